"""The launches of one op: planned once for each kind of call, bound once for each set of addresses.

A call is an op, its attributes, and how its operands lie. Its launches are those of the plan
without fusion (`compiler.pipeline.unfused`), with the kernels that the device's target chooses; of
a view there is none. To bind a kernel takes longer than to run a small one, so launches are kept
by the addresses of their operands, which come again in a loop (`blocks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, cast

import numpy as np

from actorflow.compile.hardware import target_for
from actorflow.eager_mode.blocks import Pool, PoolBlock
from actorflow.environment.host import cudnn_for, gpu_for
from actorflow.environment.native import kernel_choice_lock
from actorflow.environment.settings import Settings
from actors.device.host import HostDevice
from actors.kernels.common.kernel import ALIGNMENT_BYTES, in_sequence
from actors.kernels.host import catalogue
from actors.kernels.library.launch import NativeLaunch
from actors.machine.protocol import Array, Block, Launch, OpenDevice, PlacedArray
from compiler.contract.attrs import Attrs, PlainValue
from compiler.contract.placement import HOST, Device
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Arena
from compiler.contract.types import MOST_ELEMENTS, DType, TensorType, ValueId, numpy_dtype
from compiler.graph.graph import Graph, Node
from compiler.graph.registry import Layout, Op, OpTypeError, infer_type, view
from compiler.graph.target import CompileOptions, KernelCall, one_device
from compiler.ops.language.program_ops import FUSED
from compiler.ops.primitives.shape import STOP_GRADIENT
from compiler.ops.primitives.sources import CONSTANT, INPUT, declared_type
from compiler.pipeline.unfused import LoneOperand, lone_op
from compiler.storage.storage import assign_storage, call_of, dense_layout, is_dense

if TYPE_CHECKING:
    from actors.kernels.common.kernel import HostKernel
    from actors.kernels.cuda.kernel import CudaKernel

_MOST_CALLS = 4096
"""Kinds of calls that are kept; a loop over ever other sizes begins anew then."""

_MOST_BOUND = 512
"""Sets of addresses that a call is kept bound to."""


class ValueLayout:
    """How a value lies: as a dense tensor, or as views on one. There is one object of each form."""

    __slots__ = ("children", "layout", "operand", "type")

    def __init__(self, type_: TensorType, layout: Layout, operand: LoneOperand) -> None:
        self.type = type_
        self.layout = layout
        self.operand = operand
        self.children: dict[tuple[Op, Attrs], ValueLayout] = {}


@dataclass(slots=True)
class ValueStorage:
    """Where a value lies: a form, so many bytes into a block."""

    block: PoolBlock
    offset_bytes: int
    form: ValueLayout


@dataclass(frozen=True, slots=True)
class PlacedOperand:
    """An operand of a launch: on which of the call's bytes (`_Bytes`), and how it lies there."""

    base: int
    type: TensorType
    layout: Layout


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch of a call before it has addresses."""

    kernel: str
    attrs: Attrs
    inputs: tuple[PlacedOperand, ...]
    outputs: tuple[PlacedOperand, ...]
    workspace_bytes: int


@dataclass(slots=True)
class OpCall:
    """A kind of call.

    Args:
        types: of the outputs.
        has_gradient: whether a gradient may flow from the outputs to the inputs.
        view: of a view, where its output lies and how far into what it shows; then it has no more.
        forms: of the outputs.
        sizes: bytes of the blocks that a run takes: of the outputs, then of what lies between.
        copies: what is copied before the launches: from base to base, so many bytes.
        bound: launches by addresses.
    """

    types: tuple[TensorType, ...]
    has_gradient: bool
    view: tuple[ValueLayout, int] | None = None
    forms: tuple[ValueLayout, ...] = ()
    sizes: tuple[int, ...] = ()
    constants: tuple[Block, ...] = ()
    launches: tuple[PlannedLaunch, ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    bound: dict[tuple[int, ...], Launch] = field(default_factory=dict)


class Kernels:
    """What computes eager values, in one thread, with the kernels that settings ask for.

    `failed_at` is the user's line and the op at which its GPU failed, "" as long as it did not.
    Raises CompileError or DeviceError for a device that is not here.
    """

    def __init__(self, settings: Settings, device: Device = HOST, *, deterministic: bool) -> None:
        gpu = gpu_for((device,), None, settings)
        self._target = target_for(device, gpu, cudnn_for(settings) if gpu else None)
        opened, self._kernels = _opened(device, gpu, settings, deterministic=deterministic)
        self._device = opened
        self._stream = opened.make_stream("eager")
        self._memory = device.place.memory
        self.pool = Pool(partial(opened.allocate, memory=self._memory))
        self._settings, self._deterministic = settings, deterministic
        self._options = CompileOptions("eager", is_training=False, verify=settings.verify)
        self._hardware = one_device(self._target, device)
        self._forms: dict[TensorType, ValueLayout] = {}
        self._calls: dict[tuple[Op, Attrs, tuple[ValueLayout, ...]], OpCall] = {}
        self._generation = 0
        self._constants: dict[Attrs, ValueStorage] = {}
        self._scratch: tuple[int, Block] = (0, None)
        self.failed_at = ""

    def forget(self) -> None:
        """Let go of all that is planned and bound."""
        self._calls.clear()
        self._forms.clear()

    def dense(self, type_: TensorType) -> ValueLayout:
        """Return the form of a dense tensor."""
        form = self._forms.get(type_)
        if form is None:
            form = self._forms[type_] = ValueLayout(type_, dense_layout(type_), LoneOperand(type_))
        return form

    def store(self, type_: TensorType, array: Array) -> ValueStorage:
        """Return a copy of an array, of bits for bfloat16."""
        stored = ValueStorage(self.pool.allocate(type_.size_bytes), 0, self.dense(type_))
        self._device.write(self._window(stored), array)
        return stored

    def read(self, stored: ValueStorage) -> Array:
        """Return the bytes of a value as an array, bfloat16 as uint16: of a GPU a copy."""
        window = self._window(stored)
        return window if isinstance(window, np.ndarray) else self._device.read(window)

    def _window(self, stored: ValueStorage) -> PlacedArray:
        form = stored.form
        offset = stored.offset_bytes + form.layout.offset_bytes
        strides = form.layout.strides_bytes
        return self._device.view(stored.block.memory, offset, form.type, strides)

    def constant(self, attrs: Attrs) -> ValueStorage:
        """Return what a node `constant` holds; those of one element are kept."""
        stored = self._constants.get(attrs)
        if stored is None:
            type_ = declared_type(attrs)
            bits = np.frombuffer(cast("bytes", attrs["data"]), numpy_dtype(type_.dtype))
            stored = self.store(type_, bits.reshape(type_.shape))
            if type_.num_elements == 1:
                if len(self._constants) >= _MOST_CALLS:
                    self._constants.clear()
                self._constants[attrs] = stored
        return stored

    def call(self, op: Op, attrs: Attrs, forms: tuple[ValueLayout, ...]) -> OpCall:
        """Return a kind of call, planned at its first use. Raises CompileError or OpTypeError."""
        key = (op, attrs, forms)
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self.forget()
            call = self._calls[key] = self._plan(op, attrs, forms)
        return call

    def run(self, call: OpCall, inputs: Sequence[ValueStorage]) -> tuple[ValueStorage, ...]:
        """Compute the outputs of a call."""
        if call.view is not None:
            form, delta = call.view
            return (ValueStorage(inputs[0].block, inputs[0].offset_bytes + delta, form),)
        blocks = [self.pool.allocate(size) for size in call.sizes]
        key = (
            *[x.block.address + x.offset_bytes for x in inputs],
            *[block.address for block in blocks],
        )
        if self._generation != self.pool.generation:
            self._unbind()
        launch = call.bound.get(key)
        if launch is None:
            launch = self._bind(call, inputs, blocks)
            if len(call.bound) >= _MOST_BOUND:
                call.bound.clear()
            call.bound[key] = launch
        launch()
        return tuple(
            [ValueStorage(b, 0, form) for b, form in zip(blocks, call.forms, strict=False)]
        )

    def _unbind(self) -> None:
        """Drop the launches that keep blocks of an earlier generation."""
        for call in self._calls.values():
            call.bound.clear()
        self._generation = self.pool.generation

    def _plan(self, op: Op, attrs: Attrs, forms: tuple[ValueLayout, ...]) -> OpCall:
        types = tuple([form.type for form in forms])
        outputs = infer_type.get(op)(types, attrs)
        for out in outputs:
            if not out.is_possible:
                raise OpTypeError(f"it would make {out}, of more than {MOST_ELEMENTS:,} elements")
        # No gradient flows through a number that is no float, or through what stops it.
        has_gradient = op is not STOP_GRADIENT and any([t.dtype.is_float for t in outputs])
        call = OpCall(outputs, has_gradient)
        if view.has(op):
            layout = view.get(op)(types[0], forms[0].layout, call.types[0], attrs)
            if layout is not None:
                call.view = self._seen(forms[0], op, attrs, call.types[0], layout)
                return call
        operands = [form.operand for form in forms]
        graph = lone_op(op, attrs, operands, self._hardware, self._options)
        devices = self._hardware.devices
        with kernel_choice_lock(self._settings, devices, deterministic=self._deterministic):
            self._plan_launches(call, graph, len(forms))
        call.forms = tuple([self.dense(type_) for type_ in call.types])
        return call

    def _plan_launches(self, call: OpCall, graph: Graph, num_inputs: int) -> None:
        """Plan the launches of a lone op. Raises LookupError where the device has no kernel."""
        places = _Bytes(graph, num_inputs)
        launches: list[PlannedLaunch] = []
        for node in places.launches():
            info = self._target.query(places.call_of(node))
            # A program reads an operand before it writes what lies over it, wherever that is.
            is_program = self._kernels[info.kernel].op == FUSED.name
            over = {} if is_program else {i: node.outputs[out] for out, i in node.writes}
            inputs = [
                places.copy_over(value, over[i]) if i in over else places.operand(value)
                for i, value in enumerate(node.inputs)
            ]
            outputs = [places.operand(value) for value in node.outputs]
            operands = tuple(inputs), tuple(outputs)
            launches.append(PlannedLaunch(info.kernel, node.attrs, *operands, info.workspace_bytes))
        call.launches, call.copies = tuple(launches), tuple(places.copies)
        call.sizes = tuple(places.sizes)
        call.constants = tuple([self._constant_of(data) for data in places.constants])

    def _seen(
        self, form: ValueLayout, op: Op, attrs: Attrs, type_: TensorType, layout: Layout
    ) -> tuple[ValueLayout, int]:
        """Return the form of a view, and how far into the bytes of what it shows it begins."""
        begin = layout.offset_bytes
        if is_dense(type_, Layout(0, layout.strides_bytes)):
            return self.dense(type_), begin
        key = (op, attrs)
        if key not in form.children:
            operand = LoneOperand(form.operand.type, (*form.operand.views, key))
            form.children[key] = ValueLayout(type_, layout, operand)
        return form.children[key], 0

    def _bind(
        self, call: OpCall, inputs: Sequence[ValueStorage], blocks: Sequence[PoolBlock]
    ) -> Launch:
        bases = [(x.block.memory, x.offset_bytes) for x in inputs]
        bases += [(block.memory, 0) for block in blocks]
        bases += [(memory, 0) for memory in reversed(call.constants)]

        def window(operand: PlacedOperand) -> PlacedArray:
            memory, begin = bases[operand.base]
            layout, offset = operand.layout, begin + operand.layout.offset_bytes
            return device.view(memory, offset, operand.type, layout.strides_bytes)

        device, chain = self._device, list[Launch]()
        for source, target, size in call.copies:
            ends = [device.view(*bases[base], _bytes(size), (1,)) for base in (source, target)]
            chain.append(partial(self._copy, *ends))
        for launch in call.launches:
            reads = tuple([window(x) for x in launch.inputs])
            makes = tuple([window(x) for x in launch.outputs])
            types = tuple([x.type for x in (*launch.inputs, *launch.outputs)])
            workspace = self._scratch_of(launch.workspace_bytes)
            attrs = launch.attrs
            chain.append(device.bind(launch.kernel, attrs, reads, makes, workspace, types))
        whole = in_sequence(device.bind_chain(self._stream, tuple(chain)))
        is_quiet = all([isinstance(launch, NativeLaunch) for launch in chain])
        return whole if is_quiet else partial(_quietly, whole)

    def _copy(self, source: PlacedArray, target: PlacedArray) -> None:
        self._device.write(target, self._device.read(source))

    def _constant_of(self, data: Array) -> Block:
        """Return a block with some bytes."""
        block = self._device.allocate(data.size, ALIGNMENT_BYTES, self._memory)
        self._device.write(self._device.view(block, 0, _bytes(data.size), (1,)), data)
        return block

    def _scratch_of(self, size_bytes: int) -> PlacedArray | None:
        """Return scratch, which all launches share: each is done before the next one begins."""
        if not size_bytes:
            return None
        if size_bytes > self._scratch[0]:
            block = self._device.allocate(2 * size_bytes, ALIGNMENT_BYTES, self._memory)
            self._scratch = 2 * size_bytes, block
            self.pool.generation += 1  # what is bound to the smaller one would keep it
        return self._device.view(self._scratch[1], 0, _bytes(size_bytes), (1,))


def _bytes(size: int) -> TensorType:
    return TensorType(DType.UINT8, (size,))


def _opened(
    device: Device, gpu: str, settings: Settings, *, deterministic: bool
) -> tuple[OpenDevice, Mapping[str, HostKernel | CudaKernel]]:
    """Open the host, or a GPU whose launches are waited for one by one; return its kernels, too.

    A GPU is opened as for a plan that has nothing on it yet.
    """
    if device == HOST:
        kernels = catalogue.kernels_by_name()
        return HostDevice(kernels), kernels
    # Late: whoever has no GPU loads nothing that speaks to CUDA.
    from actorflow.run.open_gpus import open_gpus
    from actors.kernels.cuda.catalogue import kernels_by_name
    from actors.testing.simulated import LateSchedule

    options: tuple[tuple[str, PlainValue], ...] = (("gpu", gpu), ("deterministic", deterministic))
    arenas = (Arena(device, device.place.memory, 0, 1),)
    plan = Plan("eager", (), arenas, (), (), (), (), (), (), (), (), "", "", options)
    schedule = LateSchedule(Random(settings.sim_seed))
    (opened,) = open_gpus(plan, [device.index], replace(settings, sync=True), schedule)
    return opened, kernels_by_name(gpu)


def _quietly(launch: Launch) -> None:
    """Launch what numpy computes: overflow and NaN are values like others."""
    with np.errstate(all="ignore"):
        launch()


class _Bytes:
    """Which bytes each value of a lone op lies in: those of an operand, a block, or a constant.

    Numbers of operands come first, then those of blocks, of which the outputs have the first; those
    of constants are negative.
    """

    def __init__(self, graph: Graph, num_inputs: int) -> None:
        self.sizes: list[int] = []
        self.constants: list[Array] = []
        self.copies: list[tuple[int, int, int]] = []
        self._graph, self._storage = graph, assign_storage(graph)
        self._num_inputs = num_inputs
        self._base: dict[ValueId, int] = {}
        # What an update writes over a variable has bytes of its own here.
        self._written = {n.outputs[out] for n in graph.nodes for out, _ in n.writes}
        for output in graph.outputs:
            self._place(output.value)
        for node in graph.nodes:
            if node.op is INPUT:
                self._base[node.outputs[0]] = int(node.attrs.str_("name"))
            elif node.op is CONSTANT:
                self._add_constant(node)

    def launches(self) -> Iterator[Node]:
        """Yield the nodes that are launches, in order."""
        pairs = zip(self._graph.nodes, self._storage.is_launch, strict=True)
        return (node for node, is_launch in pairs if is_launch)

    def operand(self, value: ValueId) -> PlacedOperand:
        """Return where a value lies."""
        layout = self._storage.layout[value]
        return PlacedOperand(self._place(value), self._graph.types[value], layout)

    def copy_over(self, value: ValueId, output: ValueId) -> PlacedOperand:
        """Return an input of an update as it lies in the bytes of an output, copied there."""
        base = self._place(output)
        size = self.sizes[base - self._num_inputs]
        self.copies.append((self._base[self._root(value)], base, size))
        return PlacedOperand(base, self._graph.types[value], self._storage.layout[value])

    def call_of(self, node: Node) -> KernelCall:
        """Return what the target is asked of a launch."""
        return call_of(node, self._graph.types, self._storage.layout.__getitem__)

    def _root(self, value: ValueId) -> ValueId:
        return value if value in self._written else self._storage.root[value]

    def _place(self, value: ValueId) -> int:
        root = self._root(value)
        if root not in self._base:
            self._base[root] = self._num_inputs + len(self.sizes)
            self.sizes.append(self._graph.types[root].size_bytes)
        return self._base[root]

    def _add_constant(self, node: Node) -> None:
        memory = np.frombuffer(cast("bytes", node.attrs["data"]), np.uint8)
        self.constants.append(memory)
        self._base[node.outputs[0]] = -len(self.constants)
