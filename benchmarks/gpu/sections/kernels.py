"""Every op of the catalogue on the device against float64, among poison and guards.

An op becomes what it is in a plan: a fused program, a library's product, a kernel of its own. Bytes
around all operands are guarded, outputs and scratch are full of NaN at first, and every launch runs
twice, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from actors.device.cuda import cudnn
from actors.device.cuda.device import CudaDevice
from actors.device.cuda.driver import CudaError
from actors.kernels.common.kernel import Operand, require_plan
from actors.kernels.cuda import catalogue
from actors.kernels.cuda.calls import DeviceCall, RunCudnn, RunKernel, every_call
from actors.kernels.cuda.cudnn_library import CUDNN, CudnnLibrary
from actors.kernels.cuda.kernel import DeviceView
from actors.machine.protocol import DeviceFault
from compiler.contract.placement import Memory
from compiler.contract.types import (
    DType,
    TensorType,
    contiguous_strides,
    from_bits,
    numpy_dtype,
    to_bits,
)
from compiler.fusion import fuse
from compiler.graph.graph import Graph, GraphBuilder, Node, Output
from compiler.graph.registry import cost, find_op, reference
from compiler.ops.primitives.sources import INPUT
from gpu.cases import Row, library_rows, rows
from gpu.launched import is_launched, scratch, select
from gpu.opened import GPU, device_seconds, open_device, open_driver
from gpu.section import CUDNN_HOLDS, Findings, Place

LIMITS = {DType.FLOAT32: 1e-5, DType.FLOAT64: 1e-5, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1e-2}
"""Of the norm of the difference by the norm of what is right, by type: the coarser one of what was
given and of the result."""

_GUARD, _POISON = 0x5A, 0xFF
_MARGIN, _ALIGNMENT = 512, 256


class Wrong(Exception):
    """A kernel did what it must not."""


@dataclass(frozen=True, slots=True)
class Called:
    """An op on inputs of a type, as the graph that a plan is made of, with cuDNN or without."""

    row: Row
    dtype: DType
    graph: Graph
    inputs: tuple[np.ndarray, ...]
    uses_cudnn: CudnnLibrary | bool = False
    is_last: bool = False
    clock: Callable[[Callable[[], object]], float] | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        how = f"{' by cuDNN' * bool(self.uses_cudnn)}{', channels last' * self.is_last}"
        return f"{self.row.op} in {self.dtype.value}{how}"

    def axes(self, role: int, rank: int) -> tuple[int, ...]:
        """Return the axes of an operand as they lie, inputs counted before outputs."""
        is_weight = role == (2 if self.row.op == "conv_weight_grad" else 1)
        if not self.is_last or is_weight or rank < 3:
            return tuple(range(rank))
        return (0, *range(2, rank), 1)

    def strides(self, role: int, type_: TensorType) -> tuple[int, ...]:
        """Return how an operand lies."""
        axes = self.axes(role, type_.rank)
        steps = contiguous_strides(tuple([type_.shape[a] for a in axes]), type_.dtype.itemsize)
        return tuple([steps[axes.index(a)] for a in range(type_.rank)])


def run(found: Findings, place: Place) -> None:
    driver = open_driver(place)
    device = open_device(place, driver)
    types = (DType.FLOAT32,) if place.is_emulated else (DType.FLOAT32, DType.BFLOAT16)
    called = [_called(row, dtype) for row in rows(is_tiny=place.is_emulated) for dtype in types]
    has_cudnn = place.is_emulated or cudnn.can_run()
    found.fact("cuDNN", "tried" if has_cudnn else cudnn.why_not())
    if has_cudnn:
        library = cudnn.library_here() or True
        wide = library_rows(is_tiny=place.is_emulated)
        clock = partial(device_seconds, driver, least_s=0.005, turns=3)
        for row in wide:
            by_cudnn = replace(_called(row, DType.BFLOAT16), uses_cudnn=library)
            called.append(by_cudnn)
            if row.op.startswith("conv"):
                called.append(replace(by_cudnn, is_last=True, clock=clock, seconds=[]))
                called.append(replace(_called(row, DType.FLOAT32), uses_cudnn=library))
    # Until it was found to be right, also where this process does not come to its end.
    place.tell(CUDNN_HOLDS, False)
    calls: list[DeviceCall] = []
    with found.part("all texts are built"):
        calls += _calls(called)
        driver.load([c.text for c in calls if isinstance(c, RunKernel)])
    declined = []
    plans = [(c.record, c.workspace_bytes) for c in calls if isinstance(c, RunCudnn)]
    for record, size in dict.fromkeys(plans):
        try:
            driver.make_cudnn(record, size)
        except CudaError as error:
            declined.append(f"{record.about}: {error}")
    found.check("cuDNN has plans in the planned scratch", not declined, "; ".join(declined[:3]))
    stream = device.make_stream("check")
    found.metric("calls", len(called))
    failed, has_failed = "", False
    for name in dict.fromkeys([call.name for call in called]):
        group = [call for call in called if call.name == name]
        if failed:
            found.check(name, False, f"not tried, after {failed}")
            continue
        worst, wrong, is_fault = _tried(device, stream, group)
        found.check(name, not wrong, "; ".join(wrong[:3]) or f"{worst:.3g}", 1.0)
        failed = name if is_fault else ""
        if group[0].seconds:  # of the first, which is the largest
            found.metric(f"{group[0].row.op}_tflops", _flops(group[0]) / group[0].seconds[0] / 1e12)
        has_failed = has_failed or (bool(wrong) and bool(group[0].uses_cudnn))
    place.tell(CUDNN_HOLDS, not (failed or has_failed))


def _tried(device: CudaDevice, stream, called: list[Called]) -> tuple[float, list[str], bool]:
    """Return the worst of some calls by what is allowed, what is wrong, and if the device failed.

    What a call raises is wrong with it: the others want their verdict, too.
    """
    worst, wrong = 0.0, []
    for call in called:
        try:
            error = _error(call, _outputs(device, stream, call))
        except Exception as trouble:
            wrong.append(f"{_shapes(call)}: {type(trouble).__name__}: {trouble}")
            if isinstance(trouble, DeviceFault):  # which is the end of it in this process
                return worst, wrong, True
            continue
        worst = max(worst, error)
        if error > 1.0:
            wrong.append(f"{_shapes(call)}: {error:.3g} of what is allowed")
    return worst, wrong, False


def _called(row: Row, dtype: DType) -> Called:
    """Return the graph of a row, fused as a plan's is; inputs rounded to their types."""
    b = GraphBuilder()
    kinds = [dtype if a.dtype == np.float64 else DType(str(a.dtype)) for a in row.inputs]
    values = [
        b.emit_one(INPUT, name=str(i), dtype=kind.value, shape=a.shape)
        for i, (a, kind) in enumerate(zip(row.inputs, kinds, strict=True))
    ]
    b.outputs = [
        Output(str(i), v) for i, v in enumerate(b.emit(find_op(row.op), values, row.attrs))
    ]
    inputs = tuple([_rounded(a, kind) for a, kind in zip(row.inputs, kinds, strict=True)])
    return Called(row, dtype, fuse.run(b.freeze()), inputs)


def _rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return an array in a type, bfloat16 as its bits."""
    if dtype is DType.BFLOAT16:
        return to_bits(np.array(array, np.float32))
    return np.array(array, dtype.value)


def _numbers(array: np.ndarray, dtype: DType) -> np.ndarray:
    return from_bits(array) if dtype is DType.BFLOAT16 else array


def _shapes(call: Called) -> str:
    return ", ".join([str(list(a.shape)) for a in call.inputs])


def _sides(call: Called, node: Node) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Return the inputs and outputs of a node."""
    types = [call.graph.types[v] for v in (*node.inputs, *node.outputs)]
    operands = tuple([Operand(t, 0, call.strides(n, t)) for n, t in enumerate(types)])
    return operands[: len(node.inputs)], operands[len(node.inputs) :]


def _flops(call: Called) -> float:
    (node,) = [node for node in call.graph.nodes if is_launched(call.graph, node)]
    ins, outs = [[call.graph.types[v] for v in side] for side in (node.inputs, node.outputs)]
    return cost.get(node.op)(tuple(ins), tuple(outs), node.attrs).flops


def _chosen(call: Called, node: Node):
    name, needs = select(node, *_sides(call, node), uses_cudnn=call.uses_cudnn)
    # The small library has no plan for some calls, and ours take their place, as faster ones do.
    is_whole = call.uses_cudnn is True or bool(call.uses_cudnn and not call.uses_cudnn.is_jit)
    if is_whole and not name.startswith(CUDNN) and name not in catalogue.BY_TIME:
        raise Wrong(f"{name} computes it")
    return catalogue.kernels_by_name(GPU)[name], needs


def _calls(called: list[Called]) -> Iterator[DeviceCall]:
    """Yield the calls of all launches, so that texts are built at once; nothing is addressed."""
    for call in called:
        for node in call.graph.nodes:
            if not is_launched(call.graph, node):
                continue
            try:
                kernel, needs = _chosen(call, node)
            except (LookupError, Wrong):
                continue
            lying = _sides(call, node)
            sides = [
                tuple([DeviceView(1 << 30, x.type, x.strides_bytes) for x in operands])
                for operands in lying
            ]
            plan = require_plan(kernel, dict(node.attrs), *lying)
            calls = plan.bind(*sides, scratch(1 << 31, needs.workspace_bytes))
            yield from every_call(calls)


def _outputs(device: CudaDevice, stream, call: Called) -> list[np.ndarray]:
    """Return what the device makes of a call; what is only a view is made by the reference."""
    value_of: dict[int, np.ndarray] = {}
    graph = call.graph
    for node in graph.nodes:
        inputs = [value_of[v] for v in node.inputs]
        if node.op is INPUT:
            outputs = [call.inputs[int(str(node.attrs["name"]))]]
        elif is_launched(graph, node):
            outputs = _launched(device, stream, call, node, inputs)
        else:
            outputs = [np.ascontiguousarray(a) for a in reference.get(node.op)(node.attrs, *inputs)]
        value_of.update(zip(node.outputs, outputs, strict=True))
    return [value_of[output.value] for output in graph.outputs]


def _launched(
    device: CudaDevice, stream, call: Called, node: Node, given: list[np.ndarray]
) -> list[np.ndarray]:
    """Launch one node twice among guards. Raises Wrong."""
    kernel, needs = _chosen(call, node)
    types = [call.graph.types[v] for v in (*node.inputs, *node.outputs)]
    types.append(TensorType(DType.UINT8, (needs.workspace_bytes,)))
    places, end = [], _MARGIN
    for type_ in types:
        places.append(end)
        size = type_.size_bytes + _MARGIN
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    image = np.full(end, _GUARD, np.uint8)
    spans = [slice(p, p + t.size_bytes) for p, t in zip(places, types, strict=True)]
    for role, (span, array) in enumerate(zip(spans, given, strict=False)):
        lies = np.ascontiguousarray(array.transpose(call.axes(role, array.ndim)))
        image[span] = lies.reshape(-1).view(np.uint8)
    for span in spans[len(given) :]:
        image[span] = _POISON
    for output, index in node.writes:  # it may leave what does not change
        image[spans[len(given) + output]] = image[spans[index]]
    block = device.allocate(end, _ALIGNMENT, Memory.DEVICE)
    whole = device.view(block, 0, TensorType(DType.UINT8, (end,)), (1,))
    views = [
        device.view(block, p, t, call.strides(n, t))
        for n, (p, t) in enumerate(zip(places, types, strict=True))
    ]
    workspace = views.pop() if needs.workspace_bytes else None
    sides = tuple(views[: len(given)]), tuple(views[len(given) : len(types) - 1])
    attrs = MappingProxyType(dict(node.attrs))
    launch = device.bind(kernel.name, attrs, *sides, workspace, tuple(types[:-1]))
    (chain,) = device.bind_chain(stream, (launch,))
    images = []
    for _ in range(2):
        device.write(whole, image)
        chain()
        device.synchronize()
        images.append(device.read(whole))
    if call.clock is not None:
        call.seconds.append(call.clock(chain))
    return _checked(image, images, sides[1], spans[len(given) : len(types) - 1], spans[-1])


def _checked(
    image: np.ndarray,
    left: list[np.ndarray],
    views: tuple[DeviceView, ...],
    spans: list[slice],
    scratch: slice,
) -> list[np.ndarray]:
    """Return outputs on their views. Raises Wrong where other bytes changed, or a run differs."""
    is_guard = np.ones(len(image), bool)
    for span in (*spans, scratch):
        is_guard[span] = False
    changed = np.flatnonzero(is_guard & (left[0] != image))
    if changed.size:
        raise Wrong(f"{changed.size} bytes changed that are no output's, the first at {changed[0]}")
    for span in spans:
        if (left[0][span] != left[1][span]).any():
            raise Wrong("a second launch gives other bits")
    return [
        np.ndarray(v.shape, numpy_dtype(v.dtype), left[0][span].tobytes(), 0, v.strides_bytes)
        for span, v in zip(spans, views, strict=True)
    ]


def _error(call: Called, outputs: list[np.ndarray]) -> float:
    """Return the largest error of a result, by what is allowed of it."""
    kinds = [call.graph.types[v.value].dtype for v in call.graph.outputs]
    exact = [
        _numbers(a, call.dtype).astype(np.float64) if source.dtype == np.float64 else source
        for a, source in zip(call.inputs, call.row.inputs, strict=True)
    ]
    worst = 0.0
    for array, kind, expected in zip(outputs, kinds, call.row.outputs(tuple(exact)), strict=True):
        if expected is None:
            continue
        if not kind.is_float:
            worst = max(worst, 0.0 if np.array_equal(array, expected) else np.inf)
            continue
        got = _numbers(array, kind).astype(np.float64)
        expected = np.asarray(expected, np.float64)
        off = np.linalg.norm(np.ravel(np.nan_to_num(got - expected, nan=np.inf)))
        # What should be nothing (what the rounding of a mean leaves) is as exact as its operands.
        largest = max([1.0, *[np.abs(a).max(initial=0.0) for a in exact if a.dtype == np.float64]])
        scale = np.linalg.norm(np.ravel(expected)) or largest * np.sqrt(expected.size)
        limit = max(LIMITS[kind], LIMITS[call.dtype])
        worst = max(worst, float(off / scale) / limit) if got.size else worst
    return worst
