"""Bugs in how actors come to their end, each seeded in: a few hundred seeds find every one.

A mutant says in its docstring what it does wrong: see `test_mutants`. How runs end without one is
in `test_machine`.
"""

import pytest
from mutants import Loose, is_killed

from actors.machine.machine import Ending
from actors.machine.transitions import Message, State, message, subject_of

MUTANTS = []


def mutant(ending):
    """Make a machine with these endings a mutant; return the endings."""
    finder = {"is_found_by_oracle": vars(ending).get("is_found_by_oracle", True)}
    MUTANTS.append(type(ending.__name__, (Loose,), {"ending_type": ending, **finder}))
    return ending


@mutant
class ExhaustedKeepsItsSlots(Ending):
    """Does not take back the slots of a firing that found no more data."""

    def exhaust(self, actor, code):
        taken = [
            (message(Message.FREE, e), self.columns.table.edges[e])
            for e in self.columns.table.outputs[actor]
        ]
        for free, edge in taken:
            self.columns.take(free, edge.produce)
        super().exhaust(actor, code)


@mutant
class ExhaustedIsReady(Ending):
    """Tells its consumers that there is data when there is none."""

    def exhaust(self, actor, code):
        self.send(self.columns.wiring.readies[actor])
        super().exhaust(actor, code)


@mutant
class ClosesTooEarly(Ending):
    """Closes when an input has ended, although its tokens suffice for another firing."""

    def close(self, actor):
        for edge in self.columns.table.inputs[actor]:
            code = message(Message.READY, edge)
            if self.columns.is_ended[edge] and self.columns.level[code] >= 0:
                left = self.columns.level[code] + 1
                self.columns.take(code, left)
                self.send([message(Message.RETURN, edge)] * left)
        super().close(actor)


@mutant
class OverlooksTheEnd(Ending):
    """Does not look after a firing whether an input has ended."""

    def note_end(self, actor, code):
        super().note_end(actor, code)
        self.columns.has_end[actor] = False


@mutant
class NeverFlushes(Ending):
    """Hands the rest back where it should fire once more."""

    def flush(self, actor):
        self.finish(actor)


@mutant
class FlushesTwice(Ending):
    """Starts its last firing twice."""

    def finish_flush(self, actor, code):
        self.columns.flushing.append(actor)
        super().finish_flush(actor, code)


class FlushesTooEarly(Ending):
    """Flushes as if its conditions of one kind were met."""

    kind = None

    def flush(self, actor):
        columns = self.columns
        ends, levels = list(columns.is_ended), list(columns.level)
        for e in columns.table.inputs[actor]:
            columns.is_ended[e] |= self.kind is Message.READY
        for e in columns.table.outputs[actor]:
            free = message(Message.FREE, e)
            if levels[free] < 0 and self.kind is Message.FREE:
                columns.level[free] = 0
        super().flush(actor)
        columns.is_ended = ends
        if columns.state[actor] != State.FLUSHING:
            columns.level[:] = levels


# Tokens are still on their way to it, or a slot is still being read.
for name, kind in (
    ("FlushesBeforeEveryInputEnded", Message.READY),
    ("FlushesWithoutASlot", Message.FREE),
):
    mutant(type(name, (FlushesTooEarly,), {"kind": kind}))


@mutant
class FlushFreesInFull(Ending):
    """Sends Free for a whole firing after a flush that read less."""

    def finish_flush(self, actor, code):
        self.columns.flush_tokens[actor] = tuple([0] * len(self.columns.flush_tokens[actor]))
        self.send(self.columns.wiring.frees[actor])
        super().finish_flush(actor, code)


@mutant
class StaleFlush(Ending):
    """Hands back one token more than its flush took."""

    def finish_flush(self, actor, code):
        tokens = self.columns.flush_tokens[actor]
        self.columns.flush_tokens[actor] = tuple([count + (count > 0) for count in tokens])
        super().finish_flush(actor, code)


@mutant
class KeepsWhatItCannotRead(Ending):
    """Does not hand back the tokens that no firing will read."""

    def finish(self, actor):
        send, self.send = self.send, lambda codes: None
        try:
            for edge in self.columns.table.inputs[actor]:
                code = message(Message.READY, edge)
                self.columns.take(
                    code, self.columns.level[code] + self.columns.table.edges[edge].consume
                )
        finally:
            self.send = send
        super().finish(actor)


@mutant
class HandsBackOneSlotOfSeveral(Ending):
    """Hands back one slot of a Ready that filled several."""

    def hand_back(self, actor, code):
        self.send([message(Message.RETURN, subject_of(code))])


@mutant
class EndsBeforeItsSlotsAreHome(Ending):
    """Ends as soon as its inputs have."""

    is_found_by_oracle = False

    def end_if_home(self, actor):
        if all(self.columns.is_ended[e] for e in self.columns.table.all_inputs(actor)):
            self.columns.state[actor] = int(State.ENDED)
            self.columns.num_open -= 1


@mutant
class EndsBeforeItsInputs(Ending):
    """Ends as soon as its slots are home."""

    is_found_by_oracle = False

    def end_if_home(self, actor):
        ends = self.columns.is_ended
        self.columns.is_ended = [True] * len(ends)
        super().end_if_home(actor)
        self.columns.is_ended = ends


@pytest.mark.parametrize("machine_type", MUTANTS, ids=lambda m: m.__name__)
def test_a_few_hundred_seeds_kill_a_machine_that(machine_type):
    assert is_killed(machine_type)
