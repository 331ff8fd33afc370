"""Whether accesses conflict in an unrolled graph: once for whether, once more for all who do.

A class of bytes keeps only its last write and, per line of firings, the last read since: what came
before these is ordered with whatever they are (FastTrack: Flanagan & Freund 2009). Where that finds
a pair, everything is looked at again with the last write and read of every actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

from actors.rounds import LeftOut, Moment
from actors.table import MachineTable


class PhasedFiring(NamedTuple):
    """An actor reads or writes in its firings k with k mod modulus = residue."""

    actor: int
    modulus: int
    residue: int
    is_write: bool


class Conflict(NamedTuple):
    """Two firings that access the bytes of a class without an order."""

    bytes_class: int
    first: PhasedFiring
    first_firing: int
    second: PhasedFiring
    second_firing: int


_Accessed = tuple[int, PhasedFiring, Moment]
"""A firing that accessed the bytes of a class, and when."""

_NEVER = Moment(0, -1, ())
"""Before every firing."""


class Check:
    """Says whether some two conflicting accesses are unordered, in time per access."""

    __slots__ = (
        "_phases",
        "_reads",
        "_writes",
        "is_racy",
        "num_firings",
        "num_left_out",
        "num_lines",
        "num_pairs",
        "phases",
    )  # fmt: skip

    def __init__(self, table: MachineTable, classes: Sequence[tuple[PhasedFiring, ...]]) -> None:
        self._phases: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(table.num_actors)]
        for index, phases in enumerate(classes):
            # A write stands for the read of the same firings.
            for actor, modulus, residue, is_write in phases:
                if is_write or PhasedFiring(actor, modulus, residue, is_write=True) not in phases:
                    self._phases[actor].append((index, modulus, residue, is_write))
        self._writes: list[Moment] = [_NEVER] * len(classes)
        self._reads: list[dict[int, Moment]] = [{} for _ in classes]
        self.phases = [lcm(*[modulus for _, modulus, _, _ in row]) for row in self._phases]
        self.is_racy = False
        self.num_firings = 0
        self.num_left_out = 0
        self.num_lines = 0
        self.num_pairs = 0

    def visit(self, actor: int, firing: int, moment: Moment) -> None:
        """Take the next firing."""
        self.num_firings += 1
        line, clock, writes = moment.line, moment.clock, self._writes
        self.num_lines = len(clock)
        for index, modulus, residue, is_write in self._phases[actor]:
            if modulus > 1 and firing % modulus != residue:
                continue
            write, reads = writes[index], self._reads[index]
            self.num_pairs += 1
            if write.line != line and not write.is_before(clock):
                self.is_racy = True
            if not is_write:
                reads[line] = moment
                continue
            self.num_pairs += len(reads)
            for other, read in reads.items():
                if other != line and not read.is_before(clock):
                    self.is_racy = True
            reads.clear()
            writes[index] = moment

    def leave_out(self, rounds: LeftOut) -> None:
        """Take rounds like the last one: what accessed bytes last has moved on."""
        self.num_left_out += rounds.times * sum(rounds.fired)
        self._writes = [rounds.moved(m) if rounds.is_recent(m) else m for m in self._writes]
        for reads in self._reads:
            for line, moment in reads.items():
                if rounds.is_recent(moment):
                    reads[line] = rounds.moved(moment)


class ConflictFinder:
    """Compares each access with the last conflicting one of every other actor, per class."""

    __slots__ = ("_phases", "_reads", "_writes", "conflicts")

    def __init__(self, table: MachineTable, classes: Sequence[tuple[PhasedFiring, ...]]) -> None:
        self._phases: list[list[tuple[int, PhasedFiring]]] = [[] for _ in range(table.num_actors)]
        for index, phases in enumerate(classes):
            for phase in phases:
                self._phases[phase.actor].append((index, phase))
        self._writes: list[dict[int, _Accessed]] = [{} for _ in classes]
        self._reads: list[dict[int, _Accessed]] = [{} for _ in classes]
        self.conflicts: dict[tuple[int, int, int], Conflict] = {}

    def visit(self, actor: int, firing: int, moment: Moment) -> None:
        """Take the next firing; keep the first conflict of each class and pair of actors."""
        for index, phase in self._phases[actor]:
            if firing % phase.modulus != phase.residue:
                continue
            reads, writes = self._reads[index], self._writes[index]
            for earlier in (writes, reads) if phase.is_write else (writes,):
                for other, (last, last_phase, last_moment) in earlier.items():
                    if other != actor and not last_moment.is_before(moment.clock):
                        self.conflicts.setdefault(
                            (index, min(actor, other), max(actor, other)),
                            Conflict(index, last_phase, last, phase, firing),
                        )
            (writes if phase.is_write else reads)[actor] = (firing, phase, moment)

    def leave_out(self, rounds: LeftOut) -> None:
        """Take rounds like the last one: what accessed bytes last has moved on."""
        for accessed in (*self._writes, *self._reads):
            for actor, (firing, phase, moment) in accessed.items():
                if rounds.is_recent(moment):
                    later = firing + rounds.times * rounds.fired[actor]
                    accessed[actor] = (later, phase, rounds.moved(moment))
