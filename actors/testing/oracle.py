"""The oracle: random scenarios, random orders of their events, and how each must come out.

A seed makes a `Scenario`: a random actor graph (rates, slots, streams, credits to start with,
flushed actors, sources with and without inputs), and what happens to it (steps admitted in parts,
ends of admission with and without a limit, a source without more data, a failure, a halt).
`explore` runs a machine through it in a random order of events.

The oracle (`StampedSlots`) shares nothing with the machine. It is memory: a slot carries the number
of the token in it, is torn while it is written, and is looked at when a reader starts and when it
ends; a writer may tear it only once the reader of the token before has ended, whether or not
anybody looks again. How often each actor fires is computed from the graph and the commands alone.

It is also an intruder. A machine that takes a message too many for its own does no harm while none
is sent; so now and then the oracle sends one that must be refused: a slot, a token, an end or the
end of a firing too many, by its own count of what was delivered.

Source: deterministic simulation testing (FoundationDB; Zhou et al., SIGMOD 2021): one seeded
scheduler picks the next event, so a seed replays a run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from random import Random

from actors.machine.errors import ProtocolError
from actors.machine.machine import Machine
from actors.machine.table import OUTSIDE, Edge, MachineTable
from actors.machine.transitions import KIND_BITS, KIND_MASK, Message, State, message, subject_of
from compiler.contract.errors import InternalError

# Orders of events. Messages are delivered in any order across channels and in order on each; a
# firing may take longer than any message; firings of one stream run one at a time, in the order in
# which they were started; commands come at any moment. In half of the runs one channel or one actor
# is starved: it gets its turn only when nothing else can happen. What the order may not change (who
# fires, how often, which token is read where) is for the observer to check.

_NOBODY = -1


def channel_of(code: int) -> int:
    """Return the channel of a message about an edge: messages of one channel keep their order."""
    is_forward = code & KIND_MASK in (Message.READY, Message.END)
    return subject_of(code) << 1 | is_forward


def explore(
    machine: Machine,
    rng: Random,
    observer: StampedSlots,
    commands: Iterable[Callable[[], object]] = (),
    *,
    is_checked: bool = True,
    before_message: Callable[[int], object] = lambda code: None,
) -> int:
    """Run until nothing runs, nothing is under way and no command is left; count the events.

    The observer plays the actors' bodies: it hears when a firing has `started`, and says how it has
    `finished`: with DONE, FAILED or EXHAUSTED. `commands` are called in order, at random moments.
    `is_checked` validates the machine after every event. `before_message` sees each message before
    the machine takes it. Raises what the machine, the observer and the commands raise.
    """
    draw = rng.random
    schedule = _PendingEvents(machine, rng, observer)
    loaded, running, queue = schedule.loaded, schedule.running, deque(commands)
    pace = draw() ** 3 if draw() < 0.75 else 1.0
    haste = draw()
    num_events = 0
    while True:
        schedule.collect()
        if is_checked:
            machine.validate(chain.from_iterable(loaded))
        if queue and (not (loaded or running) or draw() < pace):
            queue.popleft()()
        elif loaded and (not running or draw() < haste):
            code = schedule.deliver()
            before_message(code)
            machine.receive(code)
        elif running:
            machine.receive(schedule.finish())
        else:
            return num_events
        num_events += 1


class _PendingEvents:
    """What can happen next: `loaded` are the channels that hold messages, `running` the firings."""

    __slots__ = (
        "_channels", "_draw", "_lazy", "_machine", "_observer", "_queues", "_slow", "loaded",
        "running",
    )  # fmt: skip

    def __init__(self, machine: Machine, rng: Random, observer: StampedSlots) -> None:
        table = machine.table
        self._draw = rng.random
        self._machine = machine
        self._observer = observer
        self._channels: list[deque[int]] = [deque() for _ in range(2 * len(table.edges))]
        self._queues: list[deque[int]] = [deque() for _ in range(max(table.streams) + 1)]
        self.loaded: list[deque[int]] = []
        self.running: list[int] = []
        victim = rng.random()
        num_channels = len(self._channels)
        self._slow = self._channels[int(victim * 4 * num_channels)] if victim < 0.25 else None
        self._lazy = int(rng.random() * table.num_actors) if 0.25 <= victim < 0.5 else _NOBODY

    def collect(self) -> None:
        """Take over what the machine sent and started."""
        machine = self._machine
        for code in machine.outbox:
            channel = self._channels[channel_of(code)]
            if not channel:
                self.loaded.append(channel)
            channel.append(code)
        machine.outbox.clear()
        for started in (machine.detached, machine.fireable, machine.flushing):
            while started:
                actor = started.popleft()
                queue = self._queues[machine.table.streams[actor]]
                queue.append(actor)
                if len(queue) == 1:
                    self._begin(actor)

    def deliver(self) -> int:
        """Take the oldest message of a channel."""
        loaded = self.loaded
        index = int(self._draw() * len(loaded))
        if loaded[index] is self._slow:
            index -= 1
        channel = loaded[index]
        code = channel.popleft()
        if not channel:
            loaded[index] = loaded[-1]
            loaded.pop()
        return code

    def finish(self) -> int:
        """End a firing and let the next one of its stream begin."""
        running = self.running
        index = int(self._draw() * len(running))
        if running[index] == self._lazy:
            index -= 1
        actor = running[index]
        running[index] = running[-1]
        running.pop()
        queue = self._queues[self._machine.table.streams[actor]]
        queue.popleft()
        kind = self._observer.finished(actor, self._machine.firing_index(actor))
        if queue:
            self._begin(queue[0])
        return message(kind, actor)

    def _begin(self, actor: int) -> None:
        self.running.append(actor)
        self._observer.started(actor, self._machine.firing_index(actor))


# Random graphs are live by construction: rates balance because they follow from chosen repetitions,
# and the slots of an edge are what one sequential schedule of a period needs, plus up to two. So a
# schedule exists, and by determinacy (Kahn 1974; Lee & Messerschmitt 1987) every order must finish.


class EventOrder(Enum):
    """What a command asks of the machine."""

    ADMIT = "admit"
    END = "end_admission"
    HALT = "halt"


@dataclass(frozen=True, slots=True)
class Command:
    """One call to the machine: `count` firings of `source`, or the limit of its end."""

    order: EventOrder
    source: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A graph and what happens to it.

    `ends` says after how many firings a source has no more data, `fails` names one actor and firing
    that raises.
    """

    table: MachineTable
    commands: tuple[Command, ...]
    ends: Mapping[int, int]
    fails: tuple[int, int] | None


def make_scenario(rng: Random) -> Scenario:
    """Return a random scenario."""
    table = random_table(rng)
    steps = rng.randint(0, 6)
    total = {s: steps * table.firings_per_step[s] for s in table.sources}
    parts = [_commands_of(rng, source, count) for source, count in total.items()]
    if rng.random() < 0.03:
        parts.append([Command(EventOrder.HALT)])
    fails = None
    if rng.random() < 0.1:
        fails = rng.randrange(table.num_actors), rng.randint(0, 3)
    ends = {s: rng.randint(0, count) for s, count in total.items() if rng.random() < 0.2}
    return Scenario(table, tuple(_merged(rng, parts)), ends, fails)


def _commands_of(rng: Random, source: int, total: int) -> list[Command]:
    """Admit a source in up to three parts, and end its admission once or twice."""
    commands: list[Command] = []
    num_left = total
    while num_left:
        count = num_left if len(commands) == 2 else rng.randint(1, num_left)
        commands.append(Command(EventOrder.ADMIT, source, count))
        num_left -= count
    limit = rng.randint(0, total) if rng.random() < 0.3 else None
    commands.append(Command(EventOrder.END, source, limit))
    if rng.random() < 0.1:
        commands.append(Command(EventOrder.END, source, rng.randint(0, total)))
    return commands


def _merged(rng: Random, parts: Sequence[list[Command]]) -> list[Command]:
    """Mix the parts at random; each keeps its order."""
    turns = [part for part in parts for _ in part]
    rng.shuffle(turns)
    place = {id(part): iter(part) for part in parts}
    return [next(place[id(part)]) for part in turns]


@dataclass(slots=True)
class _ScenarioRegister:
    """A register under construction; a register with two consumers is one object at two edges."""

    name: str
    producer: int
    produce: int
    initial: int
    num_slots: int = 0


_Link = tuple[_ScenarioRegister, int, int]
"""Register, consumer, rate of the consumer."""


def random_table(rng: Random) -> MachineTable:
    """Return a random graph of 2-7 actors without cycles that every order of events can finish."""
    num_actors = rng.randint(2, 7)
    num_sources = rng.randint(1, min(2, num_actors))
    repeat = [rng.randint(1, 3) for _ in range(num_actors)]
    links: list[_Link] = []
    for consumer in range(num_sources, num_actors):
        for producer in sorted(rng.sample(range(consumer), min(consumer, rng.randint(1, 3)))):
            links.append(_link(rng, repeat, links, producer, consumer))
    _give_slots(repeat, links)
    for register in {id(link[0]): link[0] for link in links}.values():
        register.num_slots += rng.choice((0, 0, 1, 2))
    inner = range(num_sources, num_actors)
    is_shared = rng.random() < 0.5
    num_streams = rng.randint(1, num_actors)
    return MachineTable.from_edges(
        [f"a{i}" for i in range(num_actors)],
        [
            Edge(r.name, r.producer, consumer, r.produce, rate, r.num_slots, r.initial)
            for r, consumer, rate in links
        ],
        sources=[*range(num_sources), *[a for a in inner if rng.random() < 0.1]],
        flushed=[a for a in inner if rng.random() < 0.3],
        detached=[a for a in range(num_actors) if rng.random() < 0.3],
        streams=[rng.randrange(num_streams) for _ in repeat] if is_shared else None,
    )


def _link(
    rng: Random, repeat: list[int], links: list[_Link], producer: int, consumer: int
) -> _Link:
    """Return a link by an old register of the producer, where it fits, or else by a new one."""
    old = [link[0] for link in links if link[0].producer == producer]
    if old and rng.random() < 0.5:
        rate, rest = divmod(old[-1].produce * repeat[producer], repeat[consumer])
        if not rest and rate in (1, 2, 3):
            return old[-1], consumer, rate
    scale = 1 if max(repeat[producer], repeat[consumer]) > 1 else rng.randint(1, 3)
    initial = rng.randint(1, 4) if rng.random() < 0.25 else 0
    name = f"r{producer}.{len(old)}"
    register = _ScenarioRegister(name, producer, repeat[consumer] * scale, initial)
    return register, consumer, repeat[producer] * scale


def _give_slots(repeat: list[int], links: Sequence[_Link]) -> None:
    """Give each register the most tokens of the eager sequential schedule of one period."""
    firings_left = list(repeat)
    tokens = [register.initial for register, _, _ in links]
    for register, _, _ in links:
        register.num_slots = register.initial
    while any(firings_left):
        for actor, count in enumerate(firings_left):
            takes = [(i, link[2]) for i, link in enumerate(links) if link[1] == actor]
            if not count or any([tokens[i] < rate for i, rate in takes]):
                continue
            firings_left[actor] -= 1
            for i, (register, _, _) in enumerate(links):
                if register.producer == actor:
                    tokens[i] += register.produce
                    register.num_slots = max(register.num_slots, tokens[i])
            for i, rate in takes:
                tokens[i] -= rate


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
            tokens, due = self.machine.flush_tokens(actor), tuple(self.flushes[actor].values())
            if tokens != due:
                raise OracleError(f"actor {actor} is flushed with {tokens} tokens instead of {due}")
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
        num_made = edge.produce * self.arrived[message(Message.READY, index)]
        num_begun = self.machine.firing_index(edge.consumer) + 1
        return edge.initial + num_made - edge.consume * num_begun

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
                stamp = slots[token % edge.num_slots]
                if stamp != token:
                    raise OracleError(f"{edge} holds {stamp} instead of {token} at its {when}")

    def _stamp_outputs(self, actor: int, firing: int, *, is_torn: bool) -> None:
        for index in self.table.outputs[actor]:
            edge, slots = self.table.edges[index], self.slots[index]
            first = edge.initial + firing * edge.produce
            if is_torn and self.machine.state(edge.consumer) < State.DRAINING:
                count = self.counts[edge.consumer] * edge.consume
                if first + edge.produce - edge.num_slots > count:
                    raise OracleError(f"{edge} is written in firing {firing}, {count} tokens read")
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
            num_fired = firings[producer] + table.is_flushed[producer]
            totals[index] = edge.initial + edge.produce * num_fired
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
