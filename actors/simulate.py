"""The machine on virtual time: how long a plan will take, and where it will wait.

The same machine as in the loop; only the clock and the streams are simulated. A stream executes
one firing at a time in the order in which they were started. Equal seeds give equal runs.

Source: discrete event simulation with a heap of events (Knuth, TAOCP 1, 2.2.5).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from actors.explore import channel_of
from actors.machine import Machine
from actors.table import MachineTable
from actors.timeline import Row
from actors.transitions import KIND_MASK, Message, message, subject_of
from compiler.errors import InternalError
from compiler.plan import Plan


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What a simulated run did. `rows` are its firings in order of their end."""

    makespan_ns: int
    firings: tuple[int, ...]
    busy_ns: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Busy share of the makespan, per stream."""
        return tuple([busy / max(self.makespan_ns, 1) for busy in self.busy_ns])


def simulate(
    plan: Plan | MachineTable,
    steps: int,
    durations_ns: Sequence[float] | None = None,
    *,
    seed: int = 0,
    jitter: float = 0.0,
    message_delay_ns: float = 0.0,
) -> SimulatedRun:
    """Run `steps` steps of a plan to their end on virtual time.

    Args:
        plan: A plan, or its table together with `durations_ns`.
        steps: Steps to admit before admission ends.
        durations_ns: Duration of a firing per actor; default: as the plan estimates.
        seed: Seed of the jitter.
        jitter: Durations and delays are scaled by a factor within 1 - jitter and 1 + jitter.
        message_delay_ns: Time from sending to receiving a message.

    Raises:
        ValueError: A table came without durations, or their number is wrong.
        InternalError: The plan cannot finish; the message says who waits for what.
    """
    table = MachineTable.of(plan) if isinstance(plan, Plan) else plan
    if durations_ns is None and isinstance(plan, Plan):
        durations_ns = [actor.duration_ns for actor in plan.actors]
    if durations_ns is None or len(durations_ns) != table.num_actors:
        raise ValueError(
            f"expected durations_ns for {table.num_actors} actors, got"
            f" {'none' if durations_ns is None else len(durations_ns)}"
        )
    return _Simulation(table, durations_ns, Random(seed), jitter, message_delay_ns).run(steps)


class _Simulation:
    """The state of one simulated run: virtual now, streams, and the heap of events."""

    def __init__(
        self,
        table: MachineTable,
        durations_ns: Sequence[float],
        rng: Random,
        jitter: float,
        message_delay_ns: float,
    ) -> None:
        num_streams = max(table.streams, default=-1) + 1
        self.machine = Machine(table)
        self.durations_ns = durations_ns
        self.rng = rng
        self.jitter = jitter
        self.message_delay_ns = message_delay_ns
        self.now = 0
        self.events: list[tuple[int, int, int]] = []
        self.num_events = 0
        self.last_arrival: dict[int, int] = {}
        self.queues: list[deque[int]] = [deque() for _ in range(num_streams)]
        self.started_at = [0] * num_streams
        self.busy_ns = [0] * num_streams
        self.rows: list[Row] = []

    def run(self, steps: int) -> SimulatedRun:
        machine = self.machine
        for source in machine.table.sources:
            if steps:
                machine.admit(source, steps * machine.table.firings_per_step[source])
            machine.end_admission(source)
        self._collect()
        while self.events:
            self.now, _, code = heapq.heappop(self.events)
            if code & KIND_MASK == Message.DONE:
                self._end_firing(subject_of(code))
            machine.receive(code)
            self._collect()
        if not machine.is_finished:
            raise InternalError("the plan cannot finish: " + machine.stall())
        machine.validate()
        every = range(machine.table.num_actors)
        firings = tuple([machine.firing_index(a) + 1 for a in every])
        makespan = max([row[3] for row in self.rows], default=0)
        return SimulatedRun(makespan, firings, tuple(self.busy_ns), tuple(self.rows))

    def _collect(self) -> None:
        machine = self.machine
        while machine.outbox:
            code = machine.outbox.popleft()
            if self.message_delay_ns:
                self._post(code)
            else:
                machine.receive(code)
        for started in (machine.detached, machine.fireable, machine.flushing):
            while started:
                actor = started.popleft()
                queue = self.queues[machine.table.streams[actor]]
                queue.append(actor)
                if len(queue) == 1:
                    self._begin_firing(actor)

    def _post(self, code: int) -> None:
        """Schedule a delivery, not before the previous one of the same channel."""
        channel = channel_of(code)
        arrival = self.now + self._scaled(self.message_delay_ns)
        arrival = max(arrival, self.last_arrival.get(channel, 0))
        self.last_arrival[channel] = arrival
        self._schedule(arrival, code)

    def _begin_firing(self, actor: int) -> None:
        self.started_at[self.machine.table.streams[actor]] = self.now
        end = self.now + self._scaled(self.durations_ns[actor])
        self._schedule(end, message(Message.DONE, actor))

    def _end_firing(self, actor: int) -> None:
        stream = self.machine.table.streams[actor]
        start = self.started_at[stream]
        self.rows.append((actor, self.machine.firing_index(actor), start, self.now))
        self.busy_ns[stream] += self.now - start
        queue = self.queues[stream]
        queue.popleft()
        if queue:
            self._begin_firing(queue[0])

    def _schedule(self, at: int, code: int) -> None:
        heapq.heappush(self.events, (at, self.num_events, code))
        self.num_events += 1

    def _scaled(self, duration_ns: float) -> int:
        if not self.jitter:
            return round(duration_ns)
        return round(duration_ns * self.rng.uniform(1 - self.jitter, 1 + self.jitter))
