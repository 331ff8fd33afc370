"""Actor graphs, plans and fake ports for tests."""

import operator
import weakref
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from actors.device.host import HostDevice
from actors.kernels.common.kernel import KernelNeeds, KernelPlan
from actors.loop.load import load
from actors.machine.errors import SourceExhausted
from actors.machine.machine import Machine
from actors.machine.table import Edge, MachineTable
from actors.testing.oracle import random_table
from compiler.contract.placement import HOST, Memory, StreamRole
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import (
    Actor,
    ActorKind,
    Arena,
    Field,
    Launch,
    Port,
    Register,
    RegisterKind,
    SourceLine,
    Stream,
    View,
)
from compiler.contract.types import (
    ActorId,
    DType,
    RegisterId,
    StreamId,
    TensorType,
    contiguous_strides,
)


def chain_table(num_actors, num_slots=1, **options):
    names = [f"a{i}" for i in range(num_actors)]
    edges = [Edge(f"r{i}", i, i + 1, 1, 1, num_slots) for i in range(num_actors - 1)]
    return MachineTable.from_edges(names, edges, sources=[0], **options)


@pytest.fixture(scope="session")
def make_chain():
    return chain_table


@pytest.fixture(scope="session")
def make_random():
    return random_table


class PlanMaker:
    """Builds a small plan: one register per edge, holding one float32 field `x` of shape [2]."""

    def __init__(self):
        self.streams = []
        self.registers = []
        self.views = []
        self.fields = []
        self.sources = [SourceLine("train.py", 0)]
        self.constants = []
        self.variables = []
        self.actors = []
        self.size = 0

    def register(self, name, kind, num_slots=1, size=8):
        offsets = tuple(self.size + 64 * slot for slot in range(num_slots))
        self.size += 64 * num_slots
        index = len(self.registers)
        self.registers.append(
            Register(RegisterId(index), name, kind, 0, size, num_slots, offsets, (0, 1), "")
        )
        return index

    def view(self, register, dtype=DType.FLOAT32, shape=(2,), offset=0):
        type_ = TensorType(dtype, shape)
        strides = contiguous_strides(shape, dtype.itemsize)
        self.views.append(View(RegisterId(register), offset, type_, strides))
        return len(self.views) - 1

    def edge(self, name, num_slots=1, field="x"):
        """A DATA register with its field; returns the register."""
        register = self.register(name, RegisterKind.DATA, num_slots)
        self.sources.append(SourceLine("train.py", len(self.sources)))
        view = self.view(register)
        self.fields.append(Field(field, RegisterId(register), view, len(self.sources) - 1, 0))
        return register

    def actor(self, name, kind, inputs=(), outputs=(), launches=(), **options):
        is_thread = options.pop("is_thread", kind in (ActorKind.SOURCE, ActorKind.SINK))
        stream = StreamId(len(self.streams))
        role = StreamRole.PORT if is_thread else StreamRole.COMPUTE
        self.streams.append(Stream(stream, HOST, role, 0, name))
        self.actors.append(
            Actor(
                ActorId(len(self.actors)),
                name,
                kind,
                stream,
                tuple(launches),
                tuple(Port(RegisterId(r), rate) for r, rate in inputs),
                tuple(Port(RegisterId(r), rate) for r, rate in outputs),
                options.pop("is_flushed", False),
                options.pop("duration_ns", 1000.0),
            )
        )
        assert not options
        return len(self.actors) - 1

    def launch(self, kernel, inputs=(), outputs=(), attrs=(), workspace=None):
        self.sources.append(SourceLine("train.py", len(self.sources)))
        source = len(self.sources) - 1
        return Launch(
            kernel, f"op_{kernel}", tuple(attrs), tuple(inputs), tuple(outputs), workspace,
            f"scope.{kernel}", source, 10.0,
        )  # fmt: skip

    def field_view(self, register):
        return next(f.view for f in self.fields if f.register == register)

    def plan(self, size=None):
        return Plan(
            "test", tuple(self.streams),
            (Arena(HOST, Memory.HOST, self.size if size is None else size, 64),),
            tuple(self.registers), tuple(self.views), tuple(self.actors), tuple(self.fields),
            tuple(self.variables), tuple(self.constants), tuple(self.sources), (), "", "", (),
        )  # fmt: skip


class FakeKernel:
    """Calls `body(inputs, outputs)` and records what it was bound to."""

    def __init__(self, body=lambda inputs, outputs: None):
        self.body = body
        self.bound = []

    def plan(self, attrs, inputs, outputs):
        return KernelPlan(KernelNeeds(), partial(self.bind, attrs))

    def bind(self, attrs, inputs, outputs, workspace):
        self.bound.append((dict(attrs), inputs, outputs, workspace))
        return lambda: self.body(inputs, outputs)


class FakePort:
    """Calls `body(tokens)`; records what it was bound to and how often it was closed."""

    def __init__(self, body=lambda tokens: None):
        self.body = body
        self.bound = []
        self.num_closed = 0

    def bind(self, tokens):
        self.bound.append(tokens)
        return lambda: self.body(tokens)

    def close(self):
        self.num_closed += 1


@pytest.fixture(scope="session")
def plan_maker():
    return PlanMaker


@pytest.fixture(scope="session")
def fake_kernel():
    return FakeKernel


@pytest.fixture(scope="session")
def fake_port():
    return FakePort


PATIENCE = 30
"""Seconds after which a test gives up on a thread; reached only when it fails."""


class Counting:
    """A source's body: writes 0, 1, 2, ... and ends after `length` firings."""

    def __init__(self, length=None):
        self.length = length
        self.firing = 0

    def __call__(self, tokens):
        if self.firing == self.length:
            raise SourceExhausted
        tokens[0]["x"][:] = self.firing
        self.firing += 1


class Gate:
    """A body that waits until it is opened; `close` of its port opens it for ever."""

    def __init__(self):
        self.entered = SimpleQueue()
        self.permits = SimpleQueue()

    def __call__(self, tokens):
        self.entered.put(None)
        if self.permits.get(timeout=PATIENCE) == "closed":
            self.permits.put("closed")

    def wait_entered(self):
        self.entered.get(timeout=PATIENCE)

    def open(self, times=1):
        for _ in range(times):
            self.permits.put(None)


def copy(inputs, outputs):
    outputs[0][:] = inputs[0]


def fail_at(firing, error):
    count = iter(range(1000))

    def body(*_):
        if next(count) == firing:
            raise error

    return body


def load_forgotten(plan, ports, kernels, **options):
    """Load a plan on the host; fake kernels keep no array of its arena."""
    bound = load(plan, ports, (HostDevice(kernels),), **options)
    for kernel in kernels.values():
        kernel.bound.clear()
    return bound


@pytest.fixture
def pipeline(plan_maker, fake_port, fake_kernel):
    """data -> step -> log over slots; returns the bound plan and the ports."""

    def build(source=None, compute=copy, sink=lambda tokens: None, *, num_slots=2, **log_options):
        make = plan_maker()
        batch, loss = make.edge("batch", num_slots), make.edge("loss", num_slots)
        launches = [
            make.launch("nothing", []),
            make.launch("compute", [make.field_view(batch)], [make.field_view(loss)]),
            make.launch("nothing", []),
        ]
        rate, is_one_thread = log_options.pop("rate", 1), log_options.pop("is_one_thread", False)
        make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
        make.actor(
            "step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(loss, 1)], launches=launches
        )
        make.actor("log", ActorKind.SINK, inputs=[(loss, rate)], **log_options)
        ports = {"data": fake_port(source or Counting()), "log": fake_port(sink)}
        for port in ports.values():
            if isinstance(port.body, Gate):
                port.close = lambda port=port: port.body.permits.put("closed")
        kernels = {"nothing": fake_kernel(), "compute": fake_kernel(compute)}
        plan = make.plan()
        table = MachineTable.of(plan, is_one_thread=is_one_thread)
        return load_forgotten(plan, ports, kernels, table=table), ports

    return build


@pytest.fixture(scope="session")
def bodies():
    """What fake ports and kernels do."""
    return SimpleNamespace(
        PATIENCE=PATIENCE, Counting=Counting, Gate=Gate, copy=copy, fail_at=fail_at
    )


@pytest.fixture
def join_threads(new_threads):
    """Return a function that waits for the threads of loops of this test.

    A job that an earlier test left to the collector has some of the same names.
    """

    def join():
        for thread in new_threads():
            if thread.name.startswith("actorflow-"):
                thread.join(PATIENCE)

    return join


@pytest.fixture
def no_thread_is_left(new_threads):
    yield
    assert not new_threads()


@pytest.fixture
def pair():
    """A source and a sink over two slots; checked again at the end of the test."""
    table = MachineTable.from_edges(["data", "step"], [Edge("batch", 0, 1, 1, 1, 2)], sources=[0])
    machine = Machine(table)
    yield machine
    machine.validate()


@pytest.fixture
def deadlocked(plan_maker, fake_port):
    """A bound plan that cannot go on: a may put one token on `direct` before b has three."""
    make = plan_maker()
    direct, fast = make.edge("direct"), make.edge("fast", 3, "y")
    gathered = make.edge("gathered", 3)
    make.actor("a", ActorKind.SOURCE, outputs=[(direct, 1), (fast, 1)])
    make.actor("b", ActorKind.COMPUTE, inputs=[(fast, 3)], outputs=[(gathered, 3)])
    make.actor("c", ActorKind.COMPUTE, inputs=[(direct, 1), (gathered, 1)])
    return load(make.plan(), {"a": fake_port()}, (HostDevice({}),))


@pytest.fixture
def snapshots(plan_maker, fake_port, fake_kernel):
    """Bind a plan that saves a weight after every third of its updates; returns it and the list."""

    def build(initial=None, **options):
        make = plan_maker()
        batch, staging = make.edge("batch", 2), make.edge("staging")
        updated = make.register("updated", RegisterKind.CONTROL, 3, size=0)
        weight = make.view(make.register("weight", RegisterKind.VARIABLE))
        make.actor("data", ActorKind.SOURCE, outputs=[(batch, 1)])
        make.actor(
            "step", ActorKind.COMPUTE, inputs=[(batch, 1)], outputs=[(updated, 1)],
            launches=[make.launch("update", [make.field_view(batch)], [weight])],
        )  # fmt: skip
        make.actor(
            "snapshot", ActorKind.COPY, inputs=[(updated, 3)], outputs=[(staging, 1)],
            launches=[make.launch("copy", [weight], [make.field_view(staging)])], **options,
        )  # fmt: skip
        make.actor("save", ActorKind.SINK, inputs=[(staging, 1)])
        saved = []
        ports = {
            "data": fake_port(Counting()),
            "save": fake_port(lambda tokens: saved.append(tokens[0]["x"][0])),
        }
        kernels = {"update": fake_kernel(copy), "copy": fake_kernel(copy)}
        plan = make.plan()
        table = MachineTable.of(plan, initial or {})
        return load_forgotten(plan, ports, kernels, table=table), saved

    return build


def refuse_at(bound, actors, array, before=()):
    """Let chains end in a launch that holds an array of the arena and raises from C.

    No frame of it is left in the error's traceback: only ours could keep the array.
    """
    refuse = partial(operator.index, array)
    chains = list(bound.chains)
    for actor in actors:
        chains[actor] = tuple([(*(before or chain[:-1]), refuse) for chain in chains[actor]])
    bound.chains = tuple(chains)


def arena_of(ports):
    """Return a weak reference to the block of an arena; fakes forget what they were bound to."""
    arena = weakref.ref(ports["log"].bound[0][0]["x"].base)
    for port in ports.values():
        port.bound.clear()
    return arena


@pytest.fixture(scope="session")
def arenas():
    """How tests see who keeps an arena."""
    return SimpleNamespace(of=arena_of, refuse_at=refuse_at)
