"""Small graphs under construction, their training, and targets whose kernels have made-up costs."""

from dataclasses import dataclass, replace

import numpy as np

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from compiler.contract.attrs import Attrs
from compiler.contract.placement import Device, DeviceKind, Mesh, MeshLink, joined
from compiler.graph.graph import Accumulation, GraphBuilder, Output, UpdateRule, Write
from compiler.graph.target import WIDE_IN_CACHE, Hardware, KernelInfo, Link, one_device
from compiler.ops.families.arithmetic import ADD, MUL
from compiler.ops.families.updates import ADAMW_UPDATE, INCREMENT, SGD_UPDATE
from compiler.ops.primitives.reduce import SUM
from compiler.ops.primitives.sources import CONSTANT, INPUT, SCRATCH, VARIABLE, scalar
from compiler.passes import batches
from compiler.storage.storage import assign_storage


def variable(b, name, shape, dtype="float32", role="parameter"):
    """Return a variable that begins with zeros."""
    init = (("kind", "zeros"),)
    return b.emit_one(VARIABLE, name=name, dtype=dtype, shape=shape, role=role, init=init)


def counter(b):
    """Return a counter that every step increments."""
    step = variable(b, "step", (), "int64", "counter")
    b.writes.append(Write(step, b.emit_one(INCREMENT, step)))
    return step


def accumulate(b, every):
    """Let a step be of several batches."""
    if every > 1:
        b.accumulation = Accumulation(every, variable(b, "batches", (), "int64", SCRATCH))


def descend(b, loss, weights, rate=0.1, decay=0.0, every=1):
    """Let plain descent train weights on a loss, which is an output; the rate may be a value."""
    b.outputs.append(Output("loss", loss))
    rate = scalar(b, rate, b.type_of(loss).dtype) if isinstance(rate, float) else rate
    attrs = Attrs({"weight_decay": decay})
    b.updates = [UpdateRule(SGD_UPDATE, w, (), (rate,), attrs, loss) for w in weights]
    accumulate(b, every)


def adam(b, loss, weights, every=1):
    """Let AdamW train weights on a loss; it is an output. Moments are called m0, v0, m1, ..."""
    b.outputs.append(Output("loss", loss))
    rate, step = scalar(b, 0.1, b.type_of(loss).dtype), counter(b)
    attrs = Attrs({"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01})
    for i, w in enumerate(weights):
        shape = b.type_of(w).shape
        state = tuple([variable(b, f"{name}{i}", shape, role="optimizer") for name in "mv"])
        b.updates.append(UpdateRule(ADAMW_UPDATE, w, state, (rate, step), attrs, loss))
    accumulate(b, every)


def weighted_sum(shapes, every=1):
    """Return a graph that trains variables of some shapes by AdamW on their sum, times an input."""
    b = GraphBuilder()
    x = b.emit_one(INPUT, name="x", dtype="float32", shape=())
    weights = [variable(b, f"w{i}", shape) for i, shape in enumerate(shapes)]
    total = x
    for weight, shape in zip(weights, shapes, strict=True):
        axes = tuple(range(len(shape)))
        summed = b.emit_one(SUM, weight, axes=axes, keepdims=False) if shape else weight
        total = b.emit_one(ADD, total, b.emit_one(MUL, summed, x))
    adam(b, total, weights, every)
    return b.freeze()


class Net:
    """A graph under construction whose inputs get numbers as they are made."""

    def __init__(self):
        self.b = GraphBuilder()
        self.feeds = {}

    def _fed(self, kind, array):
        name = f"{kind}{len(self.feeds)}"
        self.feeds[name] = array
        return name

    def _numbers(self, shape, dtype):
        return np.random.default_rng(len(self.feeds)).normal(size=shape).astype(dtype)

    def input(self, *shape, dtype="float64"):
        name = self._fed("in", self._numbers(shape, dtype))
        return self.b.emit_one(INPUT, name=name, dtype=dtype, shape=shape)

    def labels(self, *shape, below):
        array = np.random.default_rng(len(self.feeds)).integers(0, below, shape)
        name = self._fed("in", array)
        return self.b.emit_one(INPUT, name=name, dtype=str(array.dtype), shape=shape)

    def variable(self, *shape, dtype="float64", role="parameter"):
        name = self._fed("var", self._numbers(shape, dtype))
        return variable(self.b, name, shape, dtype, role)

    def number(self, value):
        return self.b.emit_one(
            CONSTANT, dtype="float64", shape=(), data=np.float64(value).tobytes()
        )

    def done(self, **named):
        self.b.outputs = [Output(name, value) for name, value in named.items()]
        return batches.copy_outputs(self.b.freeze())


def launches(graph):
    """Return the nodes of a graph that are launches, not views."""
    storage = assign_storage(graph)
    return [n for n, is_one in zip(graph.nodes, storage.is_launch, strict=True) if is_one]


def on_host(device):
    """Return what is wide on the host, whatever the device."""
    return WIDE_IN_CACHE


@dataclass(frozen=True)
class WideFrom:
    """What is wide from so many bytes on, with chunks of so many rows, on any device."""

    min_bytes: int
    chunk_rows: int

    def __call__(self, device):
        return self

    def choose_chunk_rows(self, rows, row_bytes):
        return self.chunk_rows


class HostCosts:
    """What made-up targets say of streams and memory: as much as the host."""

    message_ns, alignment, link, wide_values = 20_000.0, 64, None, WIDE_IN_CACHE
    epilogue_ops = ()
    reduced_dtypes = None

    def max_merged_updates(self, num_full):
        return 1


class Target(HostCosts):
    """A device whose kernels write over their first operand, want scratch and take time as told."""

    def __init__(self, name, in_place=(), duration_ns=lambda call: 1000.0, scratch=None, link=None):
        self.fingerprint = self.name = name
        self.in_place, self.duration_ns, self.scratch = in_place, duration_ns, scratch
        self.link = link

    def query(self, call):
        duration_ns = self.duration_ns(call)
        scratch = self.scratch(call) if self.scratch else 0
        pairs = ((0, 0),) if call.op in self.in_place else ()
        return KernelInfo(f"{self.name}.{call.op}", scratch, pairs, duration_ns)


def made_up(*arguments, **options):
    """Return the hardware of a single `Target`."""
    return one_device(Target(*arguments, **options))


def among(hardware, **axes):
    """Return the hardware of one rank of a mesh."""
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    return replace(hardware, ranks=joined(mesh, MeshLink()))


def sims(count, targets=None):
    """Return the hardware of some simulated devices with links, of made-up kernels."""
    link = Link(25.0, 25.0, 5_000.0)
    devices = tuple([Device(DeviceKind.SIM, index) for index in range(count)])
    return Hardware(devices, tuple(targets or [Target("made-up", link=link)] * count))
