"""The oracle: how a scenario must come out, whatever the order of events.

It shares nothing with the machine. It is memory: a slot carries the number of the token in it, is
torn while it is written, and is looked at when a reader starts and when it ends; a writer may tear
it only once the reader of the token before has ended, whether or not anybody looks again. How often
each actor fires is computed from the graph and the commands alone.

It is also an intruder. A machine that takes a message too many for its own does no harm while none
is sent; so now and then the oracle sends one that must be refused: a slot, a token, an end or the
end of a firing too many, by its own count of what was delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random

from actors.errors import ProtocolError
from actors.explore import explore
from actors.machine import Machine
from actors.proof.scenario import Command, EventOrder, Scenario
from actors.table import OUTSIDE, MachineTable
from actors.transitions import KIND_BITS, KIND_MASK, Message, State, message, subject_of
from compiler.errors import InternalError

_TORN = -1

FORGED_SHARE = 0.05
"""Of the messages that arrive, so many are preceded by one that must be refused."""


class OracleError(InternalError):
    """A run did what no order of events may do."""


def play(
    scenario: Scenario,
    machine: Machine,
    rng: Random,
    *,
    is_checked: bool,
    forged_share: float = FORGED_SHARE,
) -> int:
    """Run a scenario on a machine, check how it comes out, and return the number of events.

    `is_checked` validates the machine after every event. Raises InternalError when the run breaks a
    rule: OracleError, ProtocolError, or a broken invariant.
    """
    memory = StampedSlots(scenario, machine, Random(rng.random()), forged_share)
    commands = [partial(memory.command, command) for command in scenario.commands]
    num_events = explore(
        machine, rng, memory, commands, is_checked=is_checked, before_message=memory.arrives
    )
    memory.check_end()
    return num_events


class StampedSlots:
    """Plays the bodies of the actors on stamped slots, and gives the commands."""

    def __init__(
        self,
        scenario: Scenario,
        machine: Machine,
        rng: Random | None = None,
        forged_share: float = 0.0,
    ) -> None:
        table = scenario.table
        self.rng = rng or Random(0)
        self.forged_share = forged_share
        self.arrived = [0] * (len(table.edges) << KIND_BITS)
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
            if command.order is EventOrder.ADMIT:
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
        if command.order is EventOrder.HALT:
            self.machine.halt()
            self._halt()
        elif command.order is EventOrder.ADMIT:
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
        if self.table.is_flushed[actor] and firing >= self.expected[actor]:
            told, left = self.machine.flush_tokens(actor), tuple(self.flushes[actor].values())
            if told != left:
                raise OracleError(f"actor {actor} is flushed with {told} tokens instead of {left}")
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

    def arrives(self, code: int) -> None:
        """Count a message about an edge that is about to be delivered; perhaps forge another."""
        if self.rng.random() < self.forged_share:
            forged = self._forged()
            if forged is not None:
                self._send_forged(forged)
        if code & KIND_MASK <= Message.END:
            self.arrived[code] += 1

    def _send_forged(self, code: int) -> None:
        try:
            self.machine.receive(code)
        except ProtocolError:
            return
        what = f"{Message(code & KIND_MASK).name} {subject_of(code)}"
        raise OracleError(f"the machine took {what}, which must be refused now")

    def _forged(self) -> int | None:
        """Return a message that must be refused now, or None where the one drawn may be right."""
        machine, table = self.machine, self.table
        actor = int(self.rng.random() * table.num_actors)
        index = int(self.rng.random() * len(table.edges))
        edge = table.edges[index]
        kind = Message(int(self.rng.random() * len(Message)))
        is_running = machine.state(actor) in (State.FIRING, State.FLUSHING)
        if kind in (Message.DONE, Message.FAILED, Message.EXHAUSTED):
            is_source = table.admission[actor] is not None
            is_wrong = not is_running or (kind is Message.EXHAUSTED and not is_source)
            return message(kind, actor) if is_wrong else None
        code = message(kind, index)
        if edge.producer == OUTSIDE:
            return code if kind in (Message.FREE, Message.RETURN) else None
        if kind is Message.END:
            return code if self.arrived[code] else None
        if kind is Message.READY:
            is_open = machine.state(edge.consumer) in (State.WAITING, State.FIRING)
            return code if is_open and self._ready(index) + edge.produce > edge.num_slots else None
        brings = edge.consume if kind is Message.FREE else 1
        return code if self._free(index) + brings > edge.num_slots else None

    def _ready(self, index: int) -> int:
        """Return the tokens at the consumer of an edge, which was not flushed."""
        edge = self.table.edges[index]
        made = edge.produce * self.arrived[message(Message.READY, index)]
        begun = self.machine.firing_index(edge.consumer) + 1
        return edge.initial + made - edge.consume * begun

    def _free(self, index: int) -> int:
        """Return the free slots that the producer of an edge knows of."""
        edge = self.table.edges[index]
        back = edge.consume * self.arrived[message(Message.FREE, index)]
        back += self.arrived[message(Message.RETURN, index)]
        begun = self.machine.firing_index(edge.producer) + 1
        return edge.num_slots - edge.initial + back - edge.produce * begun

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
            if is_torn and self.machine.state(edge.consumer) < State.DRAINING:
                read = self.counts[edge.consumer] * edge.consume
                if first + edge.produce - edge.num_slots > read:
                    raise OracleError(f"{edge} is written in firing {firing}, {read} tokens read")
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
