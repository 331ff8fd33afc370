"""Actor graphs whose launches fold all that they read into numbers, on the host and on a device.

The oracle runs the launches in the order of the host, at once, with neither executor nor device. A
launch reads or writes half a token, so that what is not ordered is seen torn.
"""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from actors.device.executor import Executor, StreamHome
from actors.device.host import HostDevice
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.machine.transitions import Message, State, message
from actors.race.waits import wait_table
from actors.testing.oracle import explore
from actors.testing.simulated import LateSchedule, SimulatedDevice

MODULUS = (1 << 61) - 1
HOST = 10
"""Streams from here on are threads of the host."""


def mix(*values):
    total = 7
    for value in values:
        total = (total * 1_000_003 + value) % MODULUS
    return total


class Bodies:
    """What the actors of a table do: fold all they read into a state, and write that.

    Two actors on the ends of an edge with one slot take turns, so they share a scratch word.
    """

    def __init__(self, table):
        self.table = table
        self.states = [mix(a) for a in range(table.num_actors)]
        self.firings = [0] * table.num_actors
        self.read = [[] for _ in range(table.num_actors)]
        self.scratch = [[] for _ in range(table.num_actors)]
        self.slots = {}
        for edge in table.edges:
            if edge.producer < 0:
                continue
            self.slots[edge.producer, edge.name] = [[t, -t] for t in range(edge.num_slots)]
            if edge.num_slots == 1 and edge.producer != edge.consumer:
                word = [0]
                self.scratch[edge.producer].append(word)
                self.scratch[edge.consumer].append(word)

    def chain(self, actor, counts=None):
        """Return the launches of a firing; `counts` are tokens per input, if not the rates."""
        edges = self.table.edges
        inputs = [edges[e] for e in self.table.inputs[actor]]
        counts = counts or [e.consume for e in inputs]
        outputs = {edges[e].name: edges[e] for e in self.table.outputs[actor]}.values()

        def read(half):
            firing = self.firings[actor]
            for edge, count in zip(inputs, counts, strict=True):
                slots = self.slots[edge.producer, edge.name]
                for token in range(firing * edge.consume, firing * edge.consume + count):
                    self.read[actor].append(slots[token % len(slots)][half])

        def begin():
            for word in self.scratch[actor]:
                word[0] = actor
            read(0)

        def end():
            words = [word[0] for word in self.scratch[actor]]
            self.states[actor] = mix(self.states[actor], *self.read[actor], *words)
            self.read[actor].clear()

        def write(half):
            firing = self.firings[actor]
            for edge in outputs:
                slots = self.slots[actor, edge.name]
                first = firing * edge.produce + edge.initial
                for token in range(first, first + edge.produce):
                    slots[token % len(slots)][half] = mix(self.states[actor], token, half)
            self.firings[actor] += half

        return (begin, lambda: read(1), end, lambda: write(0), lambda: write(1))


class Driver:
    """Runs an executor's chains for `explore`, each when its firing starts or when it ends."""

    def __init__(self, executor, bodies, machine, rng):
        self.executor = executor
        self.bodies = bodies
        self.machine = machine
        self.rng = rng
        self.chains = [
            executor.bind(a, (executor.bind_chain(a, bodies.chain(a)),))
            for a in range(len(bodies.states))
        ]
        self.late = {}

    def started(self, actor, firing):
        (chain,) = self.chains[actor]
        if self.machine.state(actor) is State.FLUSHING:
            tokens = self.machine.flush_tokens(actor)
            whole = self.executor.bind_chain(actor, self.bodies.chain(actor, tokens))
            chain = self.executor.bind_flush(actor, tokens, whole)
        if self.rng.random() < 0.5:
            self.late[actor] = chain
        else:
            run(chain)

    def finished(self, actor, firing):
        run(self.late.pop(actor, ()))
        return Message.DONE


def run(chain):
    for launch in chain:
        launch()


def admit(machine, admitted):
    for source, count in admitted.items():
        if count:
            machine.admit(source, count)
        machine.end_admission(source)


def run_on_host(table, admitted):
    """The oracle: every firing at once, in the order in which they start."""
    machine, bodies = Machine(table), Bodies(table)
    admit(machine, admitted)
    while machine.outbox or machine.fireable or machine.flushing:
        if machine.outbox:
            machine.receive(machine.outbox.pop(0))
            continue
        started = machine.fireable or machine.flushing
        actor = started.popleft()
        is_flush = machine.state(actor) is State.FLUSHING
        run(bodies.chain(actor, machine.flush_tokens(actor) if is_flush else None))
        machine.receive(message(Message.DONE, actor))
    assert machine.is_finished
    return bodies.states


def make_executor(table, devices, max_ahead=2, find_waits=wait_table):
    """Return the executor of a table, with the streams below HOST on the devices in turn."""
    devices = devices if isinstance(devices, list) else [devices]
    homes = {
        s: HostDevice({}) if s >= HOST else devices[s % len(devices)]
        for s in sorted(set(table.streams))
    }
    streams = {s: StreamHome(f"stream {s}", home) for s, home in homes.items()}
    return Executor(table, streams, max_ahead=max_ahead, find_waits=find_waits)


def drive(executor, admitted, rng, *, bodies=None, look=lambda actor: None):
    """Run a graph to its end in a random order; return the states. `look` sees every firing."""
    machine = Machine(executor.table)
    bodies = bodies or Bodies(executor.table)

    class Watched(Driver):
        def finished(self, actor, firing):
            kind = super().finished(actor, firing)
            look(actor)
            return kind

    admit(machine, admitted)
    explore(machine, rng, Watched(executor, bodies, machine, rng), is_checked=False)
    assert machine.is_finished
    executor.synchronize()
    return bodies.states


def with_tokens(table, rng):
    """Give some registers one or two tokens, and as many slots more."""
    tokens, edges = {}, []
    for edge in table.edges:
        count = tokens.setdefault((edge.producer, edge.name), rng.choice([0, 0, 0, 1, 2]))
        if edge.producer >= 0 and not edge.initial:
            num_slots = edge.num_slots + count
            edge = replace(edge, num_slots=num_slots, initial=count)
        edges.append(edge)
    return replace(table, edges=tuple(edges))


def random_case(rng, make_random):
    """A random graph on up to four streams of a device, with some actors on the host.

    Some registers hold tokens from the start, in slots of their own. Half the time the sources end
    after steps of their own, so that some actors end early.
    """
    table = with_tokens(make_random(rng), rng)
    num_streams = rng.randint(1, 4)
    streams = [
        rng.randrange(num_streams) if rng.random() < 0.8 else HOST + actor
        for actor in range(table.num_actors)
    ]
    steps = rng.randint(1, 6)
    admitted = {s: steps * table.firings_per_step[s] for s in table.sources}
    if rng.random() < 0.5:
        admitted = {s: rng.randint(0, n) for s, n in admitted.items()}
    is_detached = (False,) * table.num_actors
    return replace(table, streams=tuple(streams), is_detached=is_detached), admitted


def late(rng, num_devices=1, *, schedule_type=LateSchedule, **options):
    """Return simulated devices on one schedule."""
    schedule = schedule_type(rng, **options)
    return [SimulatedDevice(schedule, index=index) for index in range(num_devices)]


def is_equal(
    table, admitted, rng, *, mutate=None, schedule_type=LateSchedule, max_ahead=2, num_devices=1,
    find_waits=wait_table, wrap=lambda device: device,
):  # fmt: skip
    """Return whether the devices give the numbers of the host; `mutate` changes the executor."""
    devices = [wrap(device) for device in late(rng, num_devices, schedule_type=schedule_type)]
    executor = make_executor(table, devices, max_ahead, find_waits)
    if mutate is not None:
        mutate(executor)
    return drive(executor, admitted, rng) == run_on_host(table, admitted)


def is_equal_for(seed, make_random, **options):
    rng = Random(seed)
    table, admitted = random_case(rng, make_random)
    return is_equal(table, admitted, rng, max_ahead=rng.randint(1, 3), **options)


def ping_pong(num_slots=2):
    """data -> first -> second on two streams."""
    edges = [Edge("r", 0, 1, 1, 1, num_slots), Edge("x", 1, 2, 1, 1, num_slots)]
    names = ["data", "first", "second"]
    return MachineTable.from_edges(names, edges, sources=[0], streams=[HOST, 0, 1])


def early_end():
    """`join` ends before `split` and `side` do: their later firings take slots it never freed.

    While all goes on, `split` need not wait for `side`, because `join` comes after it.
    """
    names = ["left", "right", "split", "side", "join"]
    edges = [
        Edge("l", 0, 2, 1, 1, 2),
        Edge("r", 1, 4, 1, 1, 2),
        Edge("x", 2, 3, 2, 1, 4),
        Edge("x", 2, 4, 2, 1, 4),
        Edge("y", 3, 4, 1, 1, 2),
    ]
    streams = [HOST, HOST + 1, 0, 1, 2]
    return MachineTable.from_edges(names, edges, sources=[0, 1], streams=streams), {0: 8, 1: 5}


def flushed_end():
    """The last firing of `late` comes without `pair`, and so perhaps before the last of `first`.

    While all goes on, `last` comes after `first` because `late` does.
    """
    names = ["first", "pair", "late", "last"]
    edges = [
        Edge("x", 0, 1, 1, 2, 4),
        Edge("x", 0, 3, 1, 1, 4),
        Edge("y", 1, 2, 1, 1, 2),
        Edge("z", 2, 3, 2, 1, 4),
    ]
    streams = [0, 1, 1, 1]
    table = MachineTable.from_edges(names, edges, sources=[0], flushed=[2], streams=streams)
    return table, {0: 3}


@pytest.fixture(scope="session")
def graphs():
    return SimpleNamespace(
        HOST=HOST, Bodies=Bodies, drive=drive, make_executor=make_executor, late=late,
        run_on_host=run_on_host, random_case=random_case, is_equal=is_equal,
        is_equal_for=is_equal_for, ping_pong=ping_pong, early_end=early_end,
        flushed_end=flushed_end,
    )  # fmt: skip
