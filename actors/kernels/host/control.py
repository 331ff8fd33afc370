"""The host's loops over a body, and its choice between two bodies.

A step's launches are bound once, in the frame of the body. Entries of the xs are copied into it
before a step, and those of the ys out of it after; a carry lies in the launch's own output, where
each step writes over it. Where all launches of a step are native, the whole loop is one call of C,
which copies no entry whose launches can be moved: these work on it where it lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from actors.kernels.common.gemm import gemm_of, views_of
from actors.kernels.common.host_memory import address, view_on
from actors.kernels.common.kernel import (
    Attrs,
    HostKernel,
    HostPlan,
    Kernel,
    KernelNeeds,
    KernelPlan,
    Operand,
    Operands,
    Workspace,
    refuse_unplanned,
    require_plan,
    steps_of,
)
from actors.kernels.library import runtime
from actors.kernels.library.gemm_onednn import PrepackedGemm
from actors.kernels.library.launch import (
    NativeChain,
    NativeLaunch,
    argument_block,
    merge_native_launches,
    native_launch,
)
from actors.kernels.library.toolchain import CompilerError
from actors.machine.protocol import Array, Arrays, Chain, Launch
from compiler.contract.errors import InternalError
from compiler.contract.plan import BodyFrame, SubPlan, frame_of
from compiler.contract.plan_tables import Launch as PlannedLaunch
from compiler.contract.plan_tables import View

_COPY_NS_PER_BYTE = 0.1

Binders = Callable[[], Mapping[str, HostKernel]]
"""Returns every kernel by its name in the plan, those of loops and branches among them."""


class _EntryCopy(NamedTuple):
    """An entry that each step copies: the one outside has the steps as its first axis."""

    name: str
    outside: Array
    inside: Array
    is_out: bool

    @property
    def ends(self) -> tuple[Array, Array]:
        """What is written, and what it is read from."""
        return (self.outside, self.inside) if self.is_out else (self.inside, self.outside)


class _MovedWord(NamedTuple):
    """The word of a launch that says where an operand is: in entry 0, and bytes to the next."""

    word: int
    first: int
    step_bytes: int


def _plan_scan(
    binders: Binders, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Run a sub-plan for every entry of an axis, on dense operands, in the frame of the body.

    A carry may lie where its first value lay. A device is chosen before the body has a plan: then
    the answer is a guess.
    """
    body = attrs["body"]
    moved_bytes = sum([operand.type.size_bytes for operand in (*inputs, *outputs)])
    if not isinstance(body, SubPlan):
        return KernelPlan(
            KernelNeeds(duration_ns=_COPY_NS_PER_BYTE * moved_bytes), refuse_unplanned
        )
    if not all([x.is_dense for x in (*inputs, *outputs)]):
        return None
    products, num_steps = held_products(body), steps_of(attrs)
    needs = KernelNeeds(
        workspace_bytes=frame_of(body.plan).size_bytes
        + sum([product.size_bytes for product in products.values()]),
        in_place=tuple([(i, i) for i in range(body.carries)]),
        duration_ns=num_steps * body.duration_ns + _COPY_NS_PER_BYTE * moved_bytes,
    )
    # Entries are read and written at their own places: a reversed scan only visits them
    # backwards.
    order = range(num_steps)[:: -1 if attrs["reverse"] else 1]

    def bind(inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        step = BoundStep(body, binders, inputs, outputs, workspace, products)
        firsts = list(zip(outputs[: body.carries], inputs[: body.carries], strict=True))
        # The memory plan may have put a carry over its first value: nothing to copy.
        firsts = [(new, old) for new, old in firsts if address(new) != address(old)]
        moves = [
            _EntryCopy(str(i), inputs[i], step.field(str(i)), False)
            for i in range(body.carries, body.carries + body.xs)
            if str(i) in step.fields
        ]
        moves += [
            _EntryCopy(f"out{i}", outputs[i], step.field(f"out{i}"), True)
            for i in range(body.carries, len(body.results))
        ]
        whole = _native_loop(step, firsts, moves, order)
        return whole or _loop(step, firsts, moves, order)

    return KernelPlan(needs, bind)


def held_products(body: SubPlan) -> dict[int, PrepackedGemm]:
    """Return the products of a step whose b is a constant of the loop, by number of launch."""
    views, first = body.plan.views, body.carries + body.xs
    constants = {views[v.view].register for v in body.plan.variables if int(v.name) >= first}
    products: dict[int, PrepackedGemm] = {}
    for number, launch in enumerate(body.launches if runtime.is_enabled() else ()):
        if launch.op != "matmul" or not launch.kernel.startswith("onednn"):
            continue
        operands = [views[v] for v in (*launch.inputs, *launch.outputs)]
        matrices = views_of([Operand(v.type, v.offset_bytes, v.strides_bytes) for v in operands])
        gemm = None if matrices is None else gemm_of(*matrices)
        if gemm is not None and operands[0 if gemm.is_swapped else 1].register in constants:
            product = PrepackedGemm.of(gemm)
            if product is not None:
                products[number] = product
    return products


class BoundStep:
    """The launches of a body, bound to its frame and to operands outside.

    `fields` are the entries of xs and ys that the body has, by name; `before` is what runs once,
    before the first step. What is `held` lies behind the frame, for no step may write over it.
    """

    def __init__(
        self,
        body: SubPlan,
        binders: Binders,
        inputs: Arrays,
        outputs: Arrays,
        workspace: Workspace,
        held: Mapping[int, PrepackedGemm] = MappingProxyType({}),
    ) -> None:
        self._binders = binders
        self._plan, self._frame = body.plan, frame_of(body.plan)
        self._block = _block(self._frame, workspace)
        # A carry lives in its output from the first step on; xs and constants are read where they
        # are.
        outside = (*outputs[: body.carries], *inputs[body.carries :])
        self._operand = {
            body.plan.views[variable.view].register: outside[int(variable.name)]
            for variable in body.plan.variables
        }
        self.fields: Mapping[str, int] = {f.name: f.view for f in body.plan.fields}
        self.before: list[NativeLaunch] = []
        launches: list[Launch] = []
        at = self._frame.size_bytes
        for number, launch in enumerate(body.launches):
            if number in held:
                size = held[number].size_bytes
                launches.append(self._with_held(held[number], launch, self._block[at : at + size]))
                at += size
            else:
                launches.append(self._bound(launch))
        self._launches = tuple(zip(body.launches, launches, strict=True))
        self.chain: Chain = merge_native_launches(tuple(launches))

    def field(self, name: str) -> Array:
        """Return an entry of the xs or ys, in the frame."""
        return self._view(self.fields[name])

    def windows(self, move: _EntryCopy) -> list[_MovedWord] | None:
        """Return the words that move all launches to where an entry lies; None if one stays.

        An entry that came may not be written over, in place of a value that a step has read.
        """
        views, entry = self._plan.views, self._plan.views[self.fields[move.name]]
        begin, end = _extent(entry)
        others = [v for name, v in self.fields.items() if name != move.name]
        # Two entries in one place of the frame: moving one would move the other.
        if any([_overlap(views[v], entry) for v in others]):
            return None
        words: list[_MovedWord] = []
        for planned, launch in self._launches:
            places = launch.places if isinstance(launch, NativeLaunch) else ()
            for number, index in enumerate((*planned.inputs, *planned.outputs)):
                view = views[index]
                if not _overlap(view, entry):
                    continue
                first, last = _extent(view)
                is_inside = begin <= first and last <= end
                # A launch without known words, one that reads beyond the entry, or one that writes
                # over it.
                if not (places and is_inside and (move.is_out or number < len(planned.inputs))):
                    return None
                target = address(move.outside) + view.offset_bytes - entry.offset_bytes
                words.append(_MovedWord(places[number], target, move.inside.nbytes))
        return words

    def _with_held(self, product: PrepackedGemm, launch: PlannedLaunch, kept: Array) -> Launch:
        a, b = [self._view(view) for view in launch.inputs]
        if product.gemm.is_swapped:
            a, b = b, a
        pack, step = product.launches((a, b, self._view(launch.outputs[0])), kept)
        self.before.append(pack)
        return step

    def _bound(self, launch: PlannedLaunch) -> Launch:
        workspace = None if launch.workspace is None else self._view(launch.workspace)
        inputs, outputs = launch.inputs, launch.outputs
        kernel, attrs = self._binders()[launch.kernel], MappingProxyType(dict(launch.attrs))
        plan = require_plan(kernel, attrs, *[self._operands(views) for views in (inputs, outputs)])
        return plan.bind(self._arrays(inputs), self._arrays(outputs), workspace)

    def _arrays(self, numbers: tuple[int, ...]) -> Arrays:
        return tuple([self._view(number) for number in numbers])

    def _operands(self, numbers: tuple[int, ...]) -> Operands:
        views = [self._plan.views[number] for number in numbers]
        return tuple([Operand(v.type, v.offset_bytes, v.strides_bytes) for v in views])

    def _view(self, index: int) -> Array:
        view: View = self._plan.views[index]
        offset = self._frame.offsets_bytes[view.register]
        if offset < 0:
            # A negative offset: the register is not in the frame but an operand from outside.
            operand = self._operand[view.register]
            block = operand.reshape(-1).view(np.uint8)
            return view_on(block, view.offset_bytes, view.type, view.strides_bytes)
        return view_on(self._block, offset + view.offset_bytes, view.type, view.strides_bytes)


def _extent(view: View) -> tuple[int, int]:
    """Return the bytes of a register that a view may touch, half-open."""
    ways = [(n - 1) * step for n, step in zip(view.type.shape, view.strides_bytes, strict=True)]
    last = view.offset_bytes + sum([way for way in ways if way > 0])
    first = view.offset_bytes + sum([way for way in ways if way < 0])
    return first, last + view.type.dtype.itemsize


def _overlap(one: View, other: View) -> bool:
    (first, last), (begin, end) = _extent(one), _extent(other)
    return one.register == other.register and first < end and begin < last


def _block(frame: BodyFrame, workspace: Workspace) -> Array:
    if workspace is None:
        if frame.size_bytes:
            raise InternalError(f"a body needs a frame of {frame.size_bytes} bytes, got none")
        return np.empty(0, np.uint8)
    return workspace


def _loop(
    step: BoundStep,
    firsts: Sequence[tuple[Array, Array]],
    moves: Sequence[_EntryCopy],
    order: range,
) -> Launch:
    """Return the loop in Python: all windows are made at load."""
    chain, nothing = step.chain, list[tuple[Array, Array]]()
    steps = [
        (
            [(m.inside[None], m.outside[t : t + 1]) for m in moves if not m.is_out],
            [(m.outside[t : t + 1], m.inside) for m in moves if m.is_out],
        )
        for t in (order if moves else ())
    ]

    def launch() -> None:
        for target, source in firsts:
            np.copyto(target, source)
        for pack in step.before:
            pack()
        for before, after in steps or repeat((nothing, nothing), len(order)):
            for target, source in before:
                np.copyto(target, source)
            for call in chain:
                call()
            for target, source in after:
                np.copyto(target, source)

    return launch


def _native_loop(
    step: BoundStep,
    firsts: Sequence[tuple[Array, Array]],
    moves: Sequence[_EntryCopy],
    order: range,
) -> NativeLaunch | None:
    """Return the loop in C; None where a launch of a step is not native."""
    # No launch, or one in Python between native ones: C cannot run the step as one call.
    if not runtime.is_enabled() or len(step.chain) != 1:
        return None
    (body,) = step.chain
    if not isinstance(body, (NativeChain, NativeLaunch)):
        return None
    function, argument = (
        (runtime.chain_runner(), body.address)
        if isinstance(body, NativeChain)
        else (body.function, body.arguments)
    )
    try:
        loop = runtime.address_in("scan.c", "af_scan")
    except CompilerError:
        return None
    words = [w for new, old in firsts for w in (address(new), address(old), 0, 0, new.nbytes)]
    per_move = [step.windows(move) for move in moves]
    copies = [move for move, windows in zip(moves, per_move, strict=True) if windows is None]
    # False sorts first: C has the copies before a step, then those after it.
    for move in sorted(copies, key=lambda move: move.is_out):
        (target, source), size = move.ends, move.inside.nbytes
        steps = (size, 0) if move.is_out else (0, size)
        words += [address(target), address(source), *steps, size]
    block, outs = argument_block(words), sum([move.is_out for move in copies])
    table = argument_block([w for part in per_move for window in part or () for w in window])
    first, last = (order[0], order.step) if len(order) else (0, 1)
    begin = NativeChain(tuple(step.before))
    keep = (step, begin, block, table, [array for pair in firsts for array in pair], list(moves))

    def explain(status: int) -> str:
        launch = body.launches[body.running] if isinstance(body, NativeChain) else body
        return str(launch.error(status))

    return native_launch(
        loop,
        (
            *(function, argument, runtime.chain_runner(), begin.address),
            *(len(order), first, last),
            *(len(firsts), len(copies) - outs, outs, ctypes.addressof(block)),
            *(sum([len(part or ()) for part in per_move]), ctypes.addressof(table)),
        ),
        keep,
        explain,
    )


ASSUMED_STEPS = 16
"""How often a loop of unknown length is assumed to go round; only estimates depend on it."""


Bodies = tuple[SubPlan, SubPlan]


def _planned(
    attrs: Attrs,
    names: tuple[str, str],
    operands: Operands,
    times: int,
    bind: Callable[[Bodies, Arrays, Arrays, Workspace], Launch],
) -> HostPlan | None:
    """Return the plan of two bodies that run one after the other, in the larger of their frames."""
    first, second = [attrs[name] for name in names]
    if not (isinstance(first, SubPlan) and isinstance(second, SubPlan)):
        return KernelPlan(
            KernelNeeds(), refuse_unplanned
        )  # a device is chosen before there are plans
    if not all([x.is_dense for x in operands]):
        return None
    bodies = (first, second)
    needs = KernelNeeds(
        workspace_bytes=max([frame_of(body.plan).size_bytes for body in bodies]),
        duration_ns=times * sum([body.duration_ns for body in bodies]),
    )
    return KernelPlan(needs, partial(bind, bodies))


def _plan_cond(
    binders: Binders, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Run one of two sub-plans, on dense operands, in the larger of their frames."""

    def bind(bodies: Bodies, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        then, otherwise = [_whole(body, binders, inputs, outputs, workspace) for body in bodies]
        flag = inputs[0]

        def launch() -> None:
            if flag.item():
                then()
            else:
                otherwise()

        return launch

    return _planned(attrs, ("then", "otherwise"), (*inputs, *outputs), 1, bind)


def _whole(
    body: SubPlan, binders: Binders, inputs: Arrays, outputs: Arrays, workspace: Workspace
) -> Launch:
    """Return one run of a body, with its results in the outputs."""
    step = BoundStep(body, binders, inputs, outputs, workspace)
    moves: list[tuple[Array, Array]] = [
        (outputs[i], step.field(f"out{i}")) for i in range(len(body.results))
    ]

    def launch() -> None:
        for call in step.chain:
            call()
        for target, source in moves:
            np.copyto(target, source)

    return launch


def _plan_while(
    binders: Binders, attrs: Attrs, inputs: Operands, outputs: Operands
) -> HostPlan | None:
    """Run a sub-plan as long as another one says, on dense operands.

    It asks for the larger frame: the test keeps nothing while the body runs.
    """

    def bind(bodies: Bodies, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        test, body = [BoundStep(b, binders, inputs, outputs, workspace) for b in bodies]
        carries = bodies[0].carries
        flag = test.field(f"out{carries}")
        firsts = [
            (new, old)
            for new, old in zip(outputs, inputs[:carries], strict=True)
            if address(new) != address(old)
        ]

        def launch() -> None:
            for target, source in firsts:
                np.copyto(target, source)
            while True:
                for call in test.chain:
                    call()
                if not flag.item():
                    return
                for call in body.chain:
                    call()

        return launch

    return _planned(attrs, ("test", "body"), (*inputs, *outputs), ASSUMED_STEPS, bind)


def control_kernels(binders: Binders) -> tuple[HostKernel, ...]:
    """Return the kernels of this file, which bind bodies with the kernels of `binders`."""
    plans = {"scan": _plan_scan, "cond": _plan_cond, "while": _plan_while}
    return tuple([Kernel(f"host.{op}", op, partial(f, binders)) for op, f in plans.items()])
