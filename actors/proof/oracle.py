"""The oracle: how a scenario must come out, whatever the order of events.

It shares nothing with the machine. It is memory: a slot carries the number of the token in it, is
torn while it is written, and is looked at when a reader starts and when it ends. How often each
actor fires is computed from the graph and the commands alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random

from actors.explore import explore
from actors.machine import Machine
from actors.proof.scenario import Command, Order, Scenario
from actors.table import MachineTable
from actors.transitions import Message
from compiler.errors import InternalError

_TORN = -1


class OracleError(InternalError):
    """A run did what no order of events may do."""


def play(scenario: Scenario, machine: Machine, rng: Random, *, is_checked: bool) -> int:
    """Run a scenario on a machine, check how it comes out, and return the number of events.

    `is_checked` validates the machine after every event. Raises InternalError when the run breaks a
    rule: OracleError, ProtocolError, or a broken invariant.
    """
    memory = Memory(scenario, machine)
    commands = [partial(memory.command, command) for command in scenario.commands]
    num_events = explore(machine, rng, memory, commands, is_checked=is_checked)
    memory.check_end()
    return num_events


class Memory:
    """Plays the bodies of the actors on stamped slots, and gives the commands."""

    def __init__(self, scenario: Scenario, machine: Machine) -> None:
        table = scenario.table
        self.table = table
        self.scenario = scenario
        self.machine = machine
        self.is_halted = False
        self.begun: list[int] = []
        self.counts = [0] * table.num_actors
        self.slots = [[_TORN] * edge.num_slots for edge in table.edges]
        for slots, edge in zip(self.slots, table.edges, strict=True):
            slots[: edge.initial] = range(edge.initial)
        self.allowed = dict.fromkeys(table.sources, 0)
        for command in scenario.commands:
            if command.order is Order.ADMIT:
                self.allowed[command.source] += command.count or 0
        self._expect()

    def _expect(self) -> None:
        self.expected, self.flushes = expected_run(self.table, self.allowed, self.scenario.ends)

    def _halt(self) -> None:
        if not self.is_halted:
            self.is_halted = True
            self.begun = self._begun()

    def _begun(self) -> list[int]:
        return [self.machine.firing_index(actor) + 1 for actor in range(self.table.num_actors)]

    def command(self, command: Command) -> None:
        """Give a command, and know what it means for the number of firings."""
        source, count = command.source, command.count
        if command.order is Order.HALT:
            self.machine.halt()
            self._halt()
        elif command.order is Order.ADMIT:
            self.machine.admit(source, count or 0)
        else:
            begun = self.machine.firing_index(source) + 1
            self.machine.end_admission(source, count)
            if count is not None:
                self.allowed[source] = max(begun, min(count, self.allowed[source]))
                self._expect()

    def started(self, actor: int, firing: int) -> None:
        """Look at the slots to read, and tear those to write."""
        if firing != self.counts[actor]:
            raise OracleError(f"actor {actor} starts firing {firing}, not {self.counts[actor]}")
        most = self.expected[actor] + self.table.is_flushed[actor] + (actor in self.scenario.ends)
        if firing >= most:
            raise OracleError(f"actor {actor} starts firing {firing} of {most}")
        self._check_inputs(actor, firing, "start")
        self._stamp_outputs(actor, firing, is_torn=True)

    def finished(self, actor: int, firing: int) -> Message:
        """Look at the slots again, and stamp what was written."""
        self._check_inputs(actor, firing, "end")
        if self.scenario.fails == (actor, firing):
            self._halt()
            return Message.FAILED
        if self.scenario.ends.get(actor) == firing:
            return Message.EXHAUSTED
        self._stamp_outputs(actor, firing, is_torn=False)
        self.counts[actor] += 1
        return Message.DONE

    def check_end(self) -> None:
        """Check that all firings happened that must, and that every actor came to its end."""
        machine = self.machine
        if not machine.is_quiescent:
            raise OracleError("nothing is left to happen, and the machine is not quiescent")
        if machine.is_halted != self.is_halted:
            raise OracleError(f"the machine has {'' if machine.is_halted else 'not '}halted")
        if self.is_halted:
            begun = self._begun()
            if any([now > then for now, then in zip(begun, self.begun, strict=True)]):
                raise OracleError(f"begun {begun} at the end, {self.begun} when it was halted")
            return
        whole = [n + flush for n, flush in zip(self.expected, self.table.is_flushed, strict=True)]
        if self.counts != whole:
            raise OracleError(f"fired {self.counts}, expected {whole}; {machine.stall()}")
        if not machine.is_finished:
            raise OracleError(f"the plan cannot finish: {machine.stall()}")

    def _check_inputs(self, actor: int, firing: int, when: str) -> None:
        is_last = self.table.is_flushed[actor] and firing >= self.expected[actor]
        for index in self.table.inputs[actor]:
            edge, slots = self.table.edges[index], self.slots[index]
            count = self.flushes[actor][index] if is_last else edge.consume
            for token in range(firing * edge.consume, firing * edge.consume + count):
                found = slots[token % edge.num_slots]
                if found != token:
                    raise OracleError(f"{edge} holds {found} instead of {token} at its {when}")

    def _stamp_outputs(self, actor: int, firing: int, *, is_torn: bool) -> None:
        for index in self.table.outputs[actor]:
            edge, slots = self.table.edges[index], self.slots[index]
            first = edge.initial + firing * edge.produce
            for token in range(first, first + edge.produce):
                slots[token % edge.num_slots] = _TORN if is_torn else token


def expected_run(
    table: MachineTable, admitted: Mapping[int, int], ends: Mapping[int, int]
) -> tuple[list[int], list[dict[int, int]]]:
    """Return full firings per actor, and the tokens that each flush finds, from the graph alone.

    Actors must be in an order without edges back.
    """
    firings: list[int] = []
    flushes: list[dict[int, int]] = []
    for actor in range(table.num_actors):
        totals = {}
        for index in table.inputs[actor]:
            edge = table.edges[index]
            producer = edge.producer
            made = firings[producer] + table.is_flushed[producer]
            totals[index] = edge.initial + edge.produce * made
        if totals:
            full = min([total // table.edges[i].consume for i, total in totals.items()])
        else:
            full = min(admitted[actor], ends.get(actor, admitted[actor]))
        firings.append(full)
        flushes.append(
            {
                i: min(table.edges[i].consume, total - full * table.edges[i].consume)
                for i, total in totals.items()
            }
        )
    return firings, flushes
