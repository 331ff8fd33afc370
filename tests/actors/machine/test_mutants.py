"""Bugs of the protocol, each seeded into the machine: a few hundred seeds find every one.

A mutant says in its docstring what it does wrong. The machine's own check that a slot comes home
only once is off, since it would find many of them first: the oracle has to, or, where a mutant says
so, the transition table. Forged messages, which only that check can refuse, come last.
"""

from random import Random

import pytest
from error_texts import raises
from mutants import NUM_SEEDS, Loose, LooseColumns, is_killed, killer

from actors.machine.columns import MachineState
from actors.machine.machine import Ending, Machine
from actors.machine.table import OUTSIDE
from actors.machine.transitions import Message, State, kind_of, message, subject_of
from actors.testing.oracle import Command, EventOrder, OracleError, Scenario, make_scenario, play

MUTANTS = []


class Mutant(Loose):
    """A machine with a bug in it."""

    def __init_subclass__(cls, *, is_base=False):
        if not is_base:
            MUTANTS.append(cls)


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
        self.intercept(lambda codes: self.outbox.extend(change(self, [*codes])))

    type(name, (Mutant,), {"seed": seed})


changing("LosesOneFreeInTen", drop(Message.FREE, 0.1))
changing("LosesOneReadyInTen", drop(Message.READY, 0.1))
changing("LosesOneReturnInTen", drop(Message.RETURN, 0.1))
changing("LosesEveryEnd", drop(Message.END))
changing("DoublesReady", double(Message.READY))
changing("DoublesFree", double(Message.FREE))
changing("DoublesReturn", double(Message.RETURN))


class ForgetsAConsumer(Mutant):
    """Leaves out the first message of every firing."""

    def seed(self):
        self._posts = tuple([posts[1:] for posts in self._posts])


class EndOvertakesReady(Mutant):
    """Sends End before the Ready of the last firing."""

    def seed(self):
        def send(codes):
            is_end = bool(codes) and kind_of(codes[0]) is Message.END
            self.outbox[:] = [*codes, *self.outbox] if is_end else [*self.outbox, *codes]

        self.intercept(send)


class SendsAtStart(Mutant, is_base=True):
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
                change(self.columns, message(Message.FREE, index), 1)

    type(name, (Mutant,), {"seed": seed})


one_credit("OneCreditTooMany", MachineState.add)
one_credit("OneCreditTooFew", MachineState.take)


def fires_without(name, kind):
    """A mutant that fires without taking its tokens, or its slots."""

    def seed(self):
        rows = [[t for t in row if kind_of(t[0]) is not kind] for row in self._takes]
        self._takes = tuple([tuple(row) for row in rows])

    type(name, (Mutant,), {"seed": seed})


fires_without("TokensNotTaken", Message.READY)
fires_without("SlotsNotTaken", Message.FREE)


class WrongRate(Mutant):
    """Counts one token for a Ready that brings several."""

    def seed(self):
        for index in range(len(self.table.edges)):
            self.columns.refill[message(Message.READY, index)] = 1


class ForgetsCredits(Mutant):
    """Does not see the tokens that a register starts with."""

    def seed(self):
        for index, edge in enumerate(self.table.edges):
            if edge.initial and self.columns.level[message(Message.READY, index)] > -edge.consume:
                self.columns.take(message(Message.READY, index), 1)


class CreditsWithoutSlots(Mutant):
    """Holds the slots free that are full at the start."""

    def seed(self):
        for index, edge in enumerate(self.table.edges):
            if edge.initial:
                self.columns.add(message(Message.FREE, index), edge.initial)


def miscounting(name, by):
    """A mutant that counts so many unmet conditions too many for one actor."""

    def seed(self):
        self.columns.unmet[self.rng.randrange(self.table.num_actors)] += by

    type(name, (Mutant,), {"seed": seed})


miscounting("MissesAWakeUp", 1)
miscounting("WakesTooEarly", -1)


class FiresTwiceAtOnce(Mutant):
    """Forgets that to be firing is an unmet condition."""

    def seed(self):
        def start(actor):
            self.fireable.append(actor)
            self.columns.unmet[actor] -= 1

        self._start_in = [start] * self.table.num_actors


# -- admission -----------------------------------------------------------------------------------


class AdmitsTooFew(Mutant):
    """Admits one firing less than asked for."""

    def admit(self, actor, count):
        if count > 1:
            super().admit(actor, count - 1)


def limiting(name, change):
    """A mutant that ends admission with another limit."""

    def end_admission(self, actor, limit=None):
        Mutant.end_admission(self, actor, None if limit is None else change(self, actor, limit))

    type(name, (Mutant,), {"end_admission": end_admission})


limiting("IgnoresTheLimit", lambda m, actor, limit: None)
limiting("LimitOffByOne", lambda m, actor, limit: limit + 1)
# Measures it against the firings that are done, not those that started.
limiting("LimitForgetsWhatRuns", lambda m, a, limit: limit + (m.columns.state[a] == State.FIRING))


class LowersTheLimitAsleep(Mutant):
    """Does not close a waiting source whose limit is lowered after its end."""

    def end_admission(self, actor, limit=None):
        edge = self.table.admission[actor]
        if (
            self.columns.is_ended[edge]
            and limit is not None
            and self.columns.state[actor] == State.WAITING
        ):
            surplus = self.columns.level[message(Message.READY, edge)] + 1
            self.columns.take(message(Message.READY, edge), max(0, surplus - limit))
            return
        super().end_admission(actor, limit)


class WholeReturns(LooseColumns):
    """Columns that add a whole firing's slots for a Return."""

    def count(self, code):
        if kind_of(code) is Message.RETURN:
            free = message(Message.FREE, subject_of(code))
            self.add(free, self.wiring.refill[free] - 1)
        super().count(code)


class ReturnCountsAsFree(Mutant):
    """Takes a Return of one slot for a Free of a whole firing's."""

    columns_type = WholeReturns


# -- failures ------------------------------------------------------------------------------------


class FailsAndGoesOn(Mutant):
    """Does not halt when a firing fails."""

    def _fail(self, actor, code):
        self.columns.state[actor] = int(State.FAILED)
        self.columns.look_up_every_message(actor)


class HaltsAllButOne(Mutant):
    """Lets one actor go on after a halt."""

    def halt(self):
        super().halt()
        actor = self.rng.randrange(self.table.num_actors)
        self.columns.unmet[actor] -= 1
        if not self.columns.unmet[actor]:
            self._start(actor)


@pytest.mark.parametrize("machine_type", MUTANTS, ids=lambda m: m.__name__)
def test_a_few_hundred_seeds_kill_a_machine_that(machine_type):
    assert is_killed(machine_type)


# -- limits that are lax ---------------------------------------------------------------------------


class SlotsToSpare(Machine):
    """Believes that every register holds one firing's slots more than there are, home included."""

    def __init__(self, table):
        super().__init__(table)
        limit = self.columns.limit = list(self.columns.limit)
        for index, edge in enumerate(table.edges):
            if edge.producer != OUTSIDE:
                free = message(Message.FREE, index)
                limit[free] += edge.produce
                limit[message(Message.READY, index)] += edge.produce
                self.columns.add(free, edge.produce)


class ExactHome(Ending):
    """Ends by the true limits."""

    def end_if_home(self, actor):
        columns = self.columns
        columns.limit, lax = columns.wiring.limit, columns.limit
        super().end_if_home(actor)
        columns.limit = lax


class LimitOneTooHigh(Machine):
    """Takes one slot, or token, more than there are, when it is sent one."""

    ending_type = ExactHome

    def __init__(self, table):
        super().__init__(table)
        self.columns.limit = tuple([limit + 1 for limit in self.columns.limit])


def test_every_plan_shows_a_machine_that_fires_without_free_slots_within_ten_orders(make_random):
    tables = [table for table in map(make_random, map(Random, range(150))) if table.inputs[-1]]
    for table in tables:
        commands = []
        for source in table.sources:
            commands.append(Command(EventOrder.ADMIT, source, 8 * table.firings_per_step[source]))
            commands.append(Command(EventOrder.END, source))
        scenario = Scenario(table, tuple(commands), {}, None)
        with raises(OracleError):
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
