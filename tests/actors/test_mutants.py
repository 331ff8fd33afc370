"""Bugs of the protocol, each seeded into the machine: a few hundred seeds find every one.

A mutant says in its docstring what it does wrong. The machine's own check that a slot comes home
only once is off, since it would find many of them first: the oracle has to, or, where a mutant says
so, the transition table. Forged messages, which only that check can refuse, come last.
"""

from itertools import islice
from random import Random

import pytest

from actors.errors import ProtocolError
from actors.machine import Machine
from actors.proof.oracle import OracleError, play
from actors.proof.scenario import Command, EventOrder, Scenario, make_scenario
from actors.table import OUTSIDE
from actors.transitions import TRANSITIONS, Message, Reaction, State, kind_of, message, subject_of

NUM_SEEDS = 600
MUTANTS = []


class Loose(Machine):
    """A machine without the check of limits, and with a place to put a bug."""

    is_found_by_oracle = True

    def __init_subclass__(cls, *, is_base=False):
        if not is_base:
            MUTANTS.append(cls)

    def __init__(self, table):
        self.rng = Random(table.num_actors)
        super().__init__(table)
        self.seed()

    def seed(self):
        """Put the bug in."""

    def _refuse(self, code):
        actor = self._owner[code] if 0 <= code < len(self._owner) else self.table.num_actors
        if actor < self.table.num_actors and kind_of(code) <= Message.RETURN:
            cell = TRANSITIONS[State(self._state[actor])][kind_of(code)]
            if cell.reaction is not Reaction.ILLEGAL:
                return
        super()._refuse(code)


def killer(machine_type, seed):
    """What finds fault with a run: the oracle, the transition table (ProtocolError), or nothing."""
    rng = Random(seed)
    scenario = make_scenario(rng)
    try:
        play(scenario, machine_type(scenario.table), rng, is_checked=False, forged_share=0.0)
    except (OracleError, ProtocolError) as error:
        return type(error)
    return None


def test_the_machine_without_a_bug_survives():
    assert {killer(Loose, seed) for seed in range(NUM_SEEDS)} == {None}


# -- messages lost, doubled, misdirected, too early ----------------------------------------------


def drop(kind, share=1.0):
    return lambda m, codes: [c for c in codes if kind_of(c) is not kind or m.rng.random() > share]


def double(kind):
    return lambda m, codes: [c for c in codes for _ in range(1 + (kind_of(c) is kind))]


def changing(name, change):
    """A mutant that changes every batch of messages that it sends."""

    def seed(self):
        self._send = lambda codes: self.outbox.extend(change(self, [*codes]))

    type(name, (Loose,), {"seed": seed})


changing("LosesOneFreeInTen", drop(Message.FREE, 0.1))
changing("LosesOneReadyInTen", drop(Message.READY, 0.1))
changing("LosesOneReturnInTen", drop(Message.RETURN, 0.1))
changing("LosesEveryEnd", drop(Message.END))
changing("DoublesReady", double(Message.READY))
changing("DoublesFree", double(Message.FREE))
changing("DoublesReturn", double(Message.RETURN))


class ForgetsAConsumer(Loose):
    """Leaves out the first message of every firing."""

    def seed(self):
        self._posts = tuple([posts[1:] for posts in self._posts])


class EndOvertakesReady(Loose):
    """Sends End before the Ready of the last firing."""

    def seed(self):
        def send(codes):
            is_end = bool(codes) and kind_of(codes[0]) is Message.END
            self.outbox[:] = [*codes, *self.outbox] if is_end else [*self.outbox, *codes]

        self._send = send


class SendsAtStart(Loose, is_base=True):
    """Sends the messages of one kind when a firing starts instead of when it is done."""

    kind = None

    def seed(self):
        posts = self._posts
        early = [[c for c in codes if kind_of(c) is self.kind] for codes in posts]
        self._posts = tuple([tuple([c for c in p if kind_of(c) is not self.kind]) for p in posts])

        def start(actor):
            self.fireable.append(actor)
            self.outbox.extend(early[actor])

        self._start_in = [start] * self.table.num_actors


type("FreesEarly", (SendsAtStart,), {"kind": Message.FREE})
type("ReadyEarly", (SendsAtStart,), {"kind": Message.READY})


# -- counters ------------------------------------------------------------------------------------


def one_credit(name, change):
    """A mutant that starts with a free slot more, or less, than there are."""

    def seed(self):
        for index, edge in enumerate(self.table.edges):
            if edge.producer != OUTSIDE:
                change(self, message(Message.FREE, index), 1)

    type(name, (Loose,), {"seed": seed})


one_credit("OneCreditTooMany", Machine._add)
one_credit("OneCreditTooFew", Machine._take)


def fires_without(name, kind):
    """A mutant that fires without taking its tokens, or its slots."""

    def seed(self):
        rows = [[t for t in row if kind_of(t[0]) is not kind] for row in self._takes]
        self._takes = tuple([tuple(row) for row in rows])

    type(name, (Loose,), {"seed": seed})


fires_without("TokensNotTaken", Message.READY)
fires_without("SlotsNotTaken", Message.FREE)


class WrongRate(Loose):
    """Counts one token for a Ready that brings several."""

    def seed(self):
        for index in range(len(self.table.edges)):
            self._refill[message(Message.READY, index)] = 1


class ForgetsCredits(Loose):
    """Does not see the tokens that a register starts with."""

    def seed(self):
        for index, edge in enumerate(self.table.edges):
            if edge.initial and self._level[message(Message.READY, index)] > -edge.consume:
                self._take(message(Message.READY, index), 1)


class CreditsWithoutSlots(Loose):
    """Holds the slots free that are full at the start."""

    def seed(self):
        for index, edge in enumerate(self.table.edges):
            if edge.initial:
                self._add(message(Message.FREE, index), edge.initial)


def miscounting(name, by):
    """A mutant that counts so many unmet conditions too many for one actor."""

    def seed(self):
        self._unmet[self.rng.randrange(self.table.num_actors)] += by

    type(name, (Loose,), {"seed": seed})


miscounting("MissesAWakeUp", 1)
miscounting("WakesTooEarly", -1)


class FiresTwiceAtOnce(Loose):
    """Forgets that to be firing is an unmet condition."""

    def seed(self):
        def start(actor):
            self.fireable.append(actor)
            self._unmet[actor] -= 1

        self._start_in = [start] * self.table.num_actors


# -- admission -----------------------------------------------------------------------------------


class AdmitsTooFew(Loose):
    """Admits one firing less than asked for."""

    def admit(self, actor, count):
        if count > 1:
            super().admit(actor, count - 1)


def limiting(name, change):
    """A mutant that ends admission with another limit."""

    def end_admission(self, actor, limit=None):
        Loose.end_admission(self, actor, None if limit is None else change(self, actor, limit))

    type(name, (Loose,), {"end_admission": end_admission})


limiting("IgnoresTheLimit", lambda m, actor, limit: None)
limiting("LimitOffByOne", lambda m, actor, limit: limit + 1)
# Measures it against the firings that are done, not those that started.
limiting("LimitForgetsWhatRuns", lambda m, a, limit: limit + (m._state[a] == State.FIRING))


class LowersTheLimitAsleep(Loose):
    """Does not close a waiting source whose limit is lowered after its end."""

    def end_admission(self, actor, limit=None):
        edge = self.table.admission[actor]
        if self._is_ended[edge] and limit is not None and self._state[actor] == State.WAITING:
            surplus = self._level[message(Message.READY, edge)] + 1
            self._take(message(Message.READY, edge), max(0, surplus - limit))
            return
        super().end_admission(actor, limit)


class ExhaustedKeepsItsSlots(Loose):
    """Does not take back the slots of a firing that found no more data."""

    def _exhaust(self, actor, code):
        taken = [(message(Message.FREE, e), self.table.edges[e]) for e in self.table.outputs[actor]]
        for free, edge in taken:
            self._take(free, edge.produce)
        super()._exhaust(actor, code)


class ExhaustedIsReady(Loose):
    """Tells its consumers that there is data when there is none."""

    def _exhaust(self, actor, code):
        self._send(self._wiring.readies[actor])
        super()._exhaust(actor, code)


# -- the way to the end --------------------------------------------------------------------------


class ClosesTooEarly(Loose):
    """Closes when an input has ended, although its tokens suffice for another firing."""

    def _close(self, actor):
        for edge in self.table.inputs[actor]:
            code = message(Message.READY, edge)
            if self._is_ended[edge] and self._level[code] >= 0:
                left = self._level[code] + 1
                self._take(code, left)
                self._send([message(Message.RETURN, edge)] * left)
        super()._close(actor)


class OverlooksTheEnd(Loose):
    """Does not look after a firing whether an input has ended."""

    def _note_end(self, actor, code):
        super()._note_end(actor, code)
        self._has_end[actor] = False


class NeverFlushes(Loose):
    """Hands the rest back where it should fire once more."""

    def _flush(self, actor):
        self._finish(actor)


class FlushesTwice(Loose):
    """Starts its last firing twice."""

    def _finish_flush(self, actor, code):
        self.flushing.append(actor)
        super()._finish_flush(actor, code)


class FlushesTooEarly(Loose, is_base=True):
    """Flushes as if its conditions of one kind were met."""

    kind = None

    def _flush(self, actor):
        ends, levels = list(self._is_ended), list(self._level)
        for e in self.table.inputs[actor]:
            self._is_ended[e] |= self.kind is Message.READY
        for e in self.table.outputs[actor]:
            free = message(Message.FREE, e)
            if levels[free] < 0 and self.kind is Message.FREE:
                self._level[free] = 0
        super()._flush(actor)
        self._is_ended = ends
        if self._state[actor] != State.FLUSHING:
            self._level[:] = levels


# Tokens are still on their way to it, or a slot is still being read.
type("FlushesBeforeEveryInputEnded", (FlushesTooEarly,), {"kind": Message.READY})
type("FlushesWithoutASlot", (FlushesTooEarly,), {"kind": Message.FREE})


class FlushFreesInFull(Loose):
    """Sends Free for a whole firing after a flush that read less."""

    def _finish_flush(self, actor, code):
        self._flush_tokens[actor] = tuple([0] * len(self._flush_tokens[actor]))
        self._send(self._wiring.frees[actor])
        super()._finish_flush(actor, code)


class StaleFlush(Loose):
    """Hands back one token more than its flush took."""

    def _finish_flush(self, actor, code):
        tokens = self._flush_tokens[actor]
        self._flush_tokens[actor] = tuple([count + (count > 0) for count in tokens])
        super()._finish_flush(actor, code)


class KeepsWhatItCannotRead(Loose):
    """Does not hand back the tokens that no firing will read."""

    def _finish(self, actor):
        send, self._send = self._send, lambda codes: None
        try:
            for edge in self.table.inputs[actor]:
                code = message(Message.READY, edge)
                self._take(code, self._level[code] + self.table.edges[edge].consume)
        finally:
            self._send = send
        super()._finish(actor)


class HandsBackOneSlotOfSeveral(Loose):
    """Hands back one slot of a Ready that filled several."""

    def _hand_back(self, actor, code):
        self._send([message(Message.RETURN, subject_of(code))])


class ReturnCountsAsFree(Loose):
    """Takes a Return of one slot for a Free of a whole firing's."""

    def _count(self, code):
        if kind_of(code) is Message.RETURN:
            free = message(Message.FREE, subject_of(code))
            self._add(free, self._wiring.refill[free] - 1)
        super()._count(code)


class EndsBeforeItsSlotsAreHome(Loose):
    """Ends as soon as its inputs have."""

    is_found_by_oracle = False

    def _end_if_home(self, actor):
        if all(self._is_ended[e] for e in self.table.all_inputs(actor)):
            self._state[actor] = int(State.ENDED)
            self.num_open -= 1


class EndsBeforeItsInputs(Loose):
    """Ends as soon as its slots are home."""

    is_found_by_oracle = False

    def _end_if_home(self, actor):
        ends = self._is_ended
        self._is_ended = [True] * len(ends)
        super()._end_if_home(actor)
        self._is_ended = ends


# -- failures ------------------------------------------------------------------------------------


class FailsAndGoesOn(Loose):
    """Does not halt when a firing fails."""

    def _fail(self, actor, code):
        self._state[actor] = int(State.FAILED)
        self._look_up_every_message(actor)


class HaltsAllButOne(Loose):
    """Lets one actor go on after a halt."""

    def halt(self):
        super().halt()
        actor = self.rng.randrange(self.table.num_actors)
        self._unmet[actor] -= 1
        if not self._unmet[actor]:
            self._start(actor)


@pytest.mark.parametrize("machine_type", MUTANTS, ids=lambda m: m.__name__)
def test_a_few_hundred_seeds_kill_a_machine_that(machine_type):
    finder = OracleError if machine_type.is_found_by_oracle else ProtocolError
    kills = (seed for seed in range(NUM_SEEDS) if killer(machine_type, seed) is finder)
    assert len(list(islice(kills, 3))) == 3


# -- limits that are lax ---------------------------------------------------------------------------


class SlotsToSpare(Machine):
    """Believes that every register holds one firing's slots more than there are, home included."""

    def __init__(self, table):
        super().__init__(table)
        self._limit = list(self._limit)
        for index, edge in enumerate(table.edges):
            if edge.producer != OUTSIDE:
                free = message(Message.FREE, index)
                self._limit[free] += edge.produce
                self._limit[message(Message.READY, index)] += edge.produce
                self._add(free, edge.produce)


class LimitOneTooHigh(Machine):
    """Takes one slot, or token, more than there are, when it is sent one."""

    def __init__(self, table):
        super().__init__(table)
        self._true = self._limit
        self._limit = tuple([limit + 1 for limit in self._limit])

    def _end_if_home(self, actor):
        self._limit, lax = self._true, self._limit
        super()._end_if_home(actor)
        self._limit = lax


def test_every_plan_shows_a_machine_that_fires_without_free_slots_within_ten_orders(make_random):
    tables = [table for table in map(make_random, map(Random, range(150))) if table.inputs[-1]]
    for table in tables:
        commands = []
        for source in table.sources:
            commands.append(Command(EventOrder.ADMIT, source, 8 * table.firings_per_step[source]))
            commands.append(Command(EventOrder.END, source))
        scenario = Scenario(table, tuple(commands), {}, None)
        with pytest.raises(OracleError, match=r"is written in firing|holds"):  # noqa: PT012
            for order in range(10):
                play(
                    scenario, SlotsToSpare(table), Random(order), is_checked=False,
                    forged_share=0.0,
                )  # fmt: skip
    assert len(tables) > 100


@pytest.mark.parametrize("machine_type", [Loose, LimitOneTooHigh])
def test_forged_messages_find_a_machine_that_takes_too_many(machine_type):
    found = 0
    for seed in range(100):
        rng = Random(seed)
        scenario = make_scenario(rng)
        try:
            play(scenario, machine_type(scenario.table), rng, is_checked=False)
        except OracleError as error:
            found += "which must be refused now" in str(error)
    assert found >= 3
