"""Whole plans with ports and variables, to be run on the host and on a device."""

from dataclasses import replace
from functools import partial
from itertools import cycle
from random import Random
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from plans import trained_plan

from actorflow.tensor.initial_values import initial_values
from actors.device.executor import Executor
from actors.device.host import HostDevice
from actors.loop.load import load
from actors.loop.loop import Loop
from actors.machine.machine import Machine
from actors.machine.table import MachineTable
from actors.machine.transitions import Message, State
from actors.race.waits import wait_table
from actors.testing.oracle import explore
from actors.testing.simulated import LateSchedule, SimulatedDevice
from compiler.contract.placement import Device, DeviceKind, StreamRole
from compiler.contract.plan_tables import ActorKind, RegisterKind, Stream
from compiler.contract.types import StreamId

GPU = Device(DeviceKind.SIM)
PORTED = (ActorKind.SOURCE, ActorKind.SINK)
STEPS = 7


def put_on_device(plan, *, is_apart=False):
    """Put all actors but sources and sinks on a device; `is_apart`: each on a stream of its own."""
    streams, actors = list(plan.streams), list(plan.actors)
    for actor in plan.actors:
        if actor.kind in PORTED:
            continue
        stream = actor.stream
        if is_apart:
            stream = StreamId(len(streams))
            streams.append(Stream(stream, GPU, StreamRole.COMPUTE, 0, f"stream of {actor.name}"))
        streams[stream] = replace(streams[stream], device=GPU)
        actors[actor.id] = replace(actor, stream=stream)
    return replace(plan, streams=tuple(streams), actors=tuple(actors))


class Recorder:
    """A sink that keeps copies of all it reads."""

    def __init__(self):
        self.rows = []

    def bind(self, tokens):
        return lambda: self.rows.append(
            [{name: np.copy(array) for name, array in token.items()} for token in tokens]
        )

    def close(self):
        """Nothing blocks here."""


class Batches:
    """A source of random bytes, the same for every run; labels are small."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def bind(self, tokens):
        def fill():
            for token in tokens:
                for array in token.values():
                    array[...] = 0
                    array[...] = self.rng.integers(0, 5, array.shape).astype(array.dtype)

        return fill

    def close(self):
        """Nothing blocks here."""


class PlanDriver:
    """Runs the chains of a bound plan for `explore`."""

    def __init__(self, bound, machine, rng):
        self.bound = bound
        self.machine = machine
        self.rng = rng
        self.chains = [cycle(phases) for phases in bound.chains]
        self.late = {}

    def started(self, actor, firing):
        chain = next(self.chains[actor])
        if self.machine.state(actor) is State.FLUSHING:
            chain = self.bound.bind_flush(actor, firing, self.machine.flush_tokens(actor))
        self.late[actor] = chain
        if self.rng.random() < 0.5:
            self.finished(actor, firing)

    def finished(self, actor, firing):
        for launch in self.late.pop(actor, ()):
            launch()
        return Message.DONE


class Zeros:
    """A device whose blocks begin as zeros, so that what nobody writes is the same in all runs."""

    blocks = ()

    def allocate(self, *request):
        block = super().allocate(*request)
        block[:] = 0
        self.blocks = (*self.blocks, block)
        return block


class HostOfZeros(Zeros, HostDevice):
    pass


class LateZeros(Zeros, SimulatedDevice):
    pass


def without_waits(is_forgotten):
    """Return `wait_table`, but for the waits of which `is_forgotten(actor, wait)` is true."""

    def find_waits(*request):
        waits = wait_table(*request)
        needed, every = [
            tuple([tuple([w for w in row if not is_forgotten(a, w)]) for a, row in enumerate(rows)])
            for rows in (waits.needed, waits.all)
        ]
        return replace(waits, needed=needed, all=every)

    return find_waits


def devices_of(plan, kernels, rng, **options):
    """Return what a plan runs on: the host, and as many simulated devices as it names."""
    schedule = LateSchedule(rng, **options)
    numbers = sorted({s.device.index for s in plan.streams if s.device.kind is DeviceKind.SIM})
    return HostOfZeros(kernels), *[LateZeros(schedule, kernels, n) for n in numbers]


class World:
    """A plan with its ports and variables, ready for one run on devices as late as `rng` likes."""

    def __init__(self, plan, kernels, rng=None, *, eagerness=None, initial=None, **options):
        self.sinks = {a.name: Recorder() for a in plan.actors if a.kind is ActorKind.SINK}
        sources = {a.name: Batches() for a in plan.actors if a.kind is ActorKind.SOURCE}
        devices = devices_of(plan, kernels, rng or Random(0), eagerness=eagerness)
        self.bound = load(
            plan,
            sources | self.sinks,
            devices,
            table=MachineTable.of(plan, initial or {}),
            make_executor=partial(Executor, **options),
        )
        self.blocks = {device.device: device.blocks for device in devices}
        for name, array in initial_values(plan, {}, 0).items():
            self.bound.variables.write(name, array)

    def explore(self, rng, steps=STEPS, initial=MappingProxyType({})):
        machine = Machine(MachineTable.of(self.bound.plan, initial))
        for source in machine.table.sources:
            machine.admit(source, steps * machine.table.firings_per_step[source])
            machine.end_admission(source)
        explore(machine, rng, PlanDriver(self.bound, machine, rng), is_checked=False)
        assert machine.is_finished
        self.bound.synchronize()

    def loop(self, steps=STEPS):
        with Loop(self.bound) as loop:
            loop.admit(steps)
            loop.end()
            loop.wait()

    def result(self):
        """All that sinks read and what the variables are at the end, as bytes."""
        rows = [
            (name, tuple(sorted(token)), *[array.tobytes() for array in token.values()])
            for name, sink in sorted(self.sinks.items())
            for row in sink.rows
            for token in row
        ]
        names = sorted([variable.name for variable in self.bound.plan.variables])
        return rows, [self.bound.variables.read(name).tobytes() for name in names]


def on_host(plan, kernels):
    world = World(plan, kernels)
    world.explore(Random(0))
    return world.result()


def on_device(plan, kernels, rng, **options):
    world = World(plan, kernels, rng, **options)
    world.explore(rng)
    return world.result()


@pytest.fixture(scope="session")
def job_plan(tmp_path_factory):
    """A training step with a snapshot of the variables after every third."""
    return trained_plan(tmp_path_factory.mktemp("plans"), 3)


def fold(inputs, outputs):
    """Mix all inputs; exact in float32. An output that is also read is a state."""
    total = 1.0
    for number, array in enumerate(inputs):
        total = total * 31 + array * (number + 3)
        total %= 8191
    outputs[0][:] = total


@pytest.fixture
def pipeline(plan_maker):
    """data -> up -> step -> down -> log; up and step share scratch bytes if `is_shared`.

    The credit "turn" makes the two take turns.
    """

    def build(*, num_slots=2, is_shared=True, has_turn=True):
        make = plan_maker()
        batch, x = make.edge("batch", 2), make.edge("x", num_slots)
        y, out = make.edge("y", num_slots), make.edge("out", 2)
        turn = make.register("turn", RegisterKind.CONTROL, 1, size=0)
        state = make.view(make.register("state", RegisterKind.VARIABLE))
        one, other = (make.register(name, RegisterKind.TEMPORARY) for name in ("one", "other"))
        if is_shared:
            make.registers[other] = replace(
                make.registers[other], offsets_bytes=make.registers[one].offsets_bytes
            )
        batch_view, x_view, y_view, out_view = (make.field_view(r) for r in (batch, x, y, out))
        scratch, scratch2 = make.view(one), make.view(other)
        ends = [(turn, 1)] if has_turn else []
        make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
        make.actor(
            "up", ActorKind.COPY, inputs=[(batch, 1)], outputs=[(x, 1), *ends],
            launches=[
                make.launch("fold", [batch_view], [scratch]),
                make.launch("fold", [scratch, batch_view], [x_view]),
            ],
        )  # fmt: skip
        make.actor(
            "step", ActorKind.COMPUTE, inputs=[(x, 1), *ends], outputs=[(y, 1)],
            launches=[
                make.launch("fold", [x_view], [scratch2]),
                make.launch("fold", [state, scratch2], [state]),
                make.launch("fold", [state, scratch2, x_view], [y_view]),
            ],
        )  # fmt: skip
        make.actor(
            "down", ActorKind.COPY, inputs=[(y, 1)], outputs=[(out, 1)],
            launches=[make.launch("fold", [y_view], [out_view])],
        )  # fmt: skip
        make.actor("log", ActorKind.SINK, inputs=[(out, 1)])
        return put_on_device(make.plan())

    return build


def as_on_paper(steps):
    """What the pipeline logs, without a plan: the same arithmetic in plain Python."""
    rng, state, logged = np.random.default_rng(0), 0, []
    for _ in range(steps):
        batch = rng.integers(0, 5, (2,))
        scratch = (31 + batch * 3) % 8191
        x = ((31 + scratch * 3) % 8191 * 31 + batch * 4) % 8191
        scratch = (31 + x * 3) % 8191
        state = ((31 + state * 3) % 8191 * 31 + scratch * 4) % 8191
        y = (((31 + state * 3) % 8191 * 31 + scratch * 4) % 8191 * 31 + x * 5) % 8191
        logged.append(((31 + y * 3) % 8191).tolist())
    return logged


@pytest.fixture
def log_of(fake_kernel):
    def run(plan, seed):
        rng = Random(seed)
        kernels = {"fold": fake_kernel(fold)}
        world = World(plan, kernels, rng, max_ahead=rng.randint(1, 3))
        world.explore(rng, steps=8)
        return [token["x"].tolist() for row in world.sinks["log"].rows for token in row]

    return run


@pytest.fixture(scope="session")
def plans():
    return SimpleNamespace(
        GPU=GPU, STEPS=STEPS, World=World, put_on_device=put_on_device, on_host=on_host,
        on_device=on_device, without_waits=without_waits, fold=fold, as_on_paper=as_on_paper,
    )  # fmt: skip
