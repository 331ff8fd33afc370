"""A few ops as a plan would launch them, on memory of one's own: what each launch takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

import compiler.pipeline.standard_ops  # noqa: F401  # registers the ops
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaDriver
from actors.device.cuda.streams import CudaStream
from actors.kernels.common.kernel import Attrs, KernelNeeds, Operand
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.cudnn_library import CudnnLibrary
from actors.kernels.cuda.kernel import DeviceView
from actors.machine.protocol import Launch
from actors.testing.emulated.driver import EmulatedDriver
from compiler.contract.attrs import AttrValue
from compiler.contract.types import DType, TensorType, ValueId, contiguous_strides, to_bits
from compiler.fusion import fuse
from compiler.graph.graph import Graph, GraphBuilder, Node, Output
from compiler.graph.registry import find_op, kernel_op, view
from compiler.ops.primitives.sources import INPUT
from gpu.opened import GPU, device_seconds

_ALIGNMENT, _BLOCK = 256, 16 << 20
_MOST_TIMES, _ENOUGH_NS = 20, 2e6
"""Launches of a graph that is timed: so many, or fewer that take so long together."""


class Emitter:
    """Emits the op of a name on values: `emit("sum", x, axes=(0,), keepdims=False)`."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()

    def __call__(self, op: str, *inputs: ValueId, **attrs: AttrValue) -> tuple[ValueId, ...]:
        return self.builder.emit(find_op(op), inputs, attrs)

    def shape(self, value: ValueId) -> tuple[int, ...]:
        """Return the extents of a value."""
        return self.builder.type_of(value).shape


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input: its type, and whether its last two axes lie the other way round."""

    dtype: DType
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def operand(self) -> Operand:
        """The input as kernels are asked for it."""
        type_ = TensorType(self.dtype, self.shape)
        if not self.is_transposed:
            return Operand(type_, 0, contiguous_strides(self.shape, self.dtype.itemsize))
        *outer, rows, columns = self.shape
        *steps, far, near = contiguous_strides((*outer, columns, rows), self.dtype.itemsize)
        return Operand(type_, 0, (*steps, near, far))


@dataclass(frozen=True, slots=True)
class Probe:
    """Ops on inputs, by a name; they are one launch once they are fused.

    `flops` are told by the second, if there are any. `kernel` is one that is launched whatever a
    plan would select; "" for none.
    """

    name: str
    inputs: tuple[Tensor, ...]
    emit: Callable[..., Sequence[ValueId]]
    flops: float = 0.0
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class ProbeLaunch:
    """A launch that was bound, what it was planned for, and the bytes of its operands."""

    name: str
    launch: Launch
    planned_ns: float
    size_bytes: int
    attrs: Attrs
    inputs: tuple[DeviceView, ...]
    flops: float = 0.0


def is_launched(graph: Graph, node: Node) -> bool:
    """Whether a node of a fused graph is a launch of a plan."""
    return node.op is not INPUT and not view.has(node.op)


def scratch(address: int, size: int) -> DeviceView | None:
    """Return the workspace of a launch; None where it needs none."""
    return DeviceView(address, TensorType(DType.UINT8, (size,)), (1,)) if size else None


def select(
    node: Node,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    *,
    uses_cudnn: CudnnLibrary | bool = False,
) -> tuple[str, KernelNeeds]:
    """Return the kernel that a plan for this GPU launches, and what it needs."""
    query = GPU, node.op.name, dict(node.attrs), tuple(inputs), tuple(outputs)
    return catalogue.select_kernel(*query, kernel_op.get(node.op) or "", uses_cudnn=uses_cudnn)


def bind_probe(device: CudaDevice, probe: Probe, address: int) -> ProbeLaunch:
    """Return the launch of a probe with all of its operands from an address on.

    Inputs come first, in their order. Raises ValueError where it is no single launch, or its kernel
    does not take it.
    """
    emit = Emitter()
    b = emit.builder
    values = [
        b.emit_one(INPUT, name=str(i), dtype=x.dtype.value, shape=x.shape)
        for i, x in enumerate(probe.inputs)
    ]
    b.outputs = [Output(str(i), v) for i, v in enumerate(probe.emit(emit, *values))]
    graph = fuse.run(b.freeze())
    launches = [node for node in graph.nodes if is_launched(graph, node)]
    if len(launches) != 1:
        raise ValueError(f"{probe.name} is {len(launches)} launches")
    (node,) = launches
    given = {v: x.operand for v, x in zip(values, probe.inputs, strict=True)}
    inputs = [given[v] for v in node.inputs]
    outputs = [Tensor(t.dtype, t.shape).operand for t in [graph.types[v] for v in node.outputs]]
    name, needs = select(node, inputs, outputs)
    if probe.kernel:
        kernel = catalogue.kernels_by_name(GPU)[probe.kernel]
        plan = kernel.plan(dict(node.attrs), tuple(inputs), tuple(outputs))
        if plan is None:
            raise ValueError(f"{probe.kernel} does not take {probe.name}")
        name, needs = probe.kernel, plan.needs
    views, end = [], address
    for operand in (*given.values(), *outputs):
        views.append(DeviceView(end, operand.type, operand.strides_bytes))
        end += -(-operand.type.size_bytes // _ALIGNMENT) * _ALIGNMENT
    view_of, attrs = dict(zip(values, views, strict=False)), MappingProxyType(dict(node.attrs))
    sides = tuple([view_of[v] for v in node.inputs]), tuple(views[len(values) :])
    workspace, types = scratch(end, needs.workspace_bytes), [x.type for x in (*inputs, *outputs)]
    launch = device.bind(name, attrs, *sides, workspace, tuple(types))
    size_bytes = sum([x.type.size_bytes for x in (*inputs, *outputs)])
    timed = launch, needs.duration_ns, size_bytes
    return ProbeLaunch(probe.name, *timed, attrs, sides[0], probe.flops)


def launch_ns(
    driver: CudaDriver, device: CudaDevice, stream: CudaStream, launch: Launch, planned_ns: float
) -> float:
    """Return what a launch takes of the device inside of a graph, which plans make of them."""
    times = max(1, min(_MOST_TIMES, int(_ENOUGH_NS / max(planned_ns, 1.0))))
    times = 1 if isinstance(driver, EmulatedDriver) else times
    (chain,) = device.bind_chain(stream, (launch,) * times)
    seconds = device_seconds(driver, chain, 0.005, 3)
    device.synchronize()
    return 1e9 * seconds / times


def fill_random(driver: CudaDriver, address: int, size: int) -> None:
    """Fill memory with normal numbers of bfloat16, which are some of float32 and float16, too.

    Zeros would be too easy: products of random numbers take more power, and so longer.
    """
    rng = np.random.default_rng(0)
    block = to_bits(rng.standard_normal(min(size, _BLOCK) // 2 + 1, np.float32))
    for begin in range(0, size, _BLOCK):
        driver.copy(address + begin, block.ctypes.data, min(_BLOCK, size - begin))
