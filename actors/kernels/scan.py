"""The host's loop over a body: the launches of a step, made again and again in one place.

A step's launches are bound once, in the frame of the body. Entries of the xs are copied into it
before a step, and those of the ys out of it after; a carry lies in the launch's own output, where
each step writes over it. Where all launches of a step are native, the whole loop is one call of C.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from actors.device.host_memory import view_on
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, Operands, Workspace
from actors.kernels.library.gemm_held import HeldProduct
from actors.kernels.native import runtime
from actors.kernels.native.chain import JoinedLaunches, join
from actors.kernels.native.gemm import gemm_of, views_of
from actors.kernels.native.launch import NativeLaunch, address, argument_block, native_launch
from actors.kernels.native.toolchain import CompilerError
from actors.protocol import Array, Arrays, Chain, Launch
from compiler.errors import InternalError
from compiler.plan import Launch as PlannedLaunch
from compiler.plan import View
from compiler.sub_plan import BodyFrame, SubPlan, frame_of

_COPY_NS_PER_BYTE = 0.1


class _EntryCopy(NamedTuple):
    """An entry that each step copies: the one outside has the steps as its first axis."""

    target: Array
    source: Array
    is_out: bool


@dataclass(frozen=True, slots=True)
class ScanKernel:
    """Runs a sub-plan for every entry of an axis. It takes dense operands."""

    name: str = "host.scan"
    op: str = "scan"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the frame of the body; a carry may lie where its first value lay.

        Whoever chooses a device asks before there is a plan of the body: then it is a guess.
        """
        body = attrs["body"]
        moved = sum([operand.type.size_bytes for operand in (*inputs, *outputs)])
        if not isinstance(body, SubPlan):
            return KernelNeeds(duration_ns=_COPY_NS_PER_BYTE * moved)
        if not all([x.is_dense for x in (*inputs, *outputs)]):
            return None
        return KernelNeeds(
            workspace_bytes=frame_of(body.plan).size_bytes
            + sum([product.size_bytes for product in held_products(body).values()]),
            in_place=tuple([(i, i) for i in range(body.carries)]),
            duration_ns=steps_of(attrs) * body.duration_ns + _COPY_NS_PER_BYTE * moved,
        )

    def bind(self, attrs: Attrs, inputs: Arrays, outputs: Arrays, workspace: Workspace) -> Launch:
        """Return the loop. Raises InternalError where the body is no plan."""
        body = attrs["body"]
        if not isinstance(body, SubPlan):
            raise InternalError("a loop is bound without the plan of its body")
        step = BoundStep(body, inputs, outputs, workspace, held_products(body))
        firsts = list(zip(outputs[: body.carries], inputs[: body.carries], strict=True))
        firsts = [(new, old) for new, old in firsts if address(new) != address(old)]
        moves = [
            _EntryCopy(step.field(str(i)), inputs[i], False)
            for i in range(body.carries, body.carries + body.xs)
            if str(i) in step.fields
        ]
        moves += [
            _EntryCopy(outputs[i], step.field(f"out{i}"), True)
            for i in range(body.carries, len(body.results))
        ]
        order = range(steps_of(attrs))[:: -1 if attrs["reverse"] else 1]
        whole = _native_loop(step, firsts, moves, order)
        return whole or _loop(step, firsts, moves, order)


def steps_of(attrs: Attrs) -> int:
    """Return how often a loop runs its body."""
    length = attrs["length"]
    if not isinstance(length, int):
        raise InternalError(f"a loop has the length {length!r}")
    return length


def held_products(body: SubPlan) -> dict[int, HeldProduct]:
    """Return the products of a step whose b is a constant of the loop, by number of launch."""
    views, first = body.plan.views, body.carries + body.xs
    constants = {views[v.view].register for v in body.plan.variables if int(v.name) >= first}
    found: dict[int, HeldProduct] = {}
    for number, launch in enumerate(body.launches if runtime.is_on() else ()):
        if launch.op != "matmul" or not launch.kernel.startswith("onednn"):
            continue
        own = [views[v] for v in (*launch.inputs, *launch.outputs)]
        known = views_of([Operand(v.type, v.offset_bytes, v.strides_bytes) for v in own])
        gemm = None if known is None else gemm_of(*known)
        if gemm is not None and own[0 if gemm.is_swapped else 1].register in constants:
            product = HeldProduct.of(gemm)
            if product is not None:
                found[number] = product
    return found


class BoundStep:
    """The launches of a body, bound to its frame and to operands outside.

    `fields` are the entries of xs and ys that the body has, by name; `before` is what runs once,
    before the first step. What is `held` lies behind the frame, for no step may write over it.
    """

    def __init__(
        self,
        body: SubPlan,
        inputs: Arrays,
        outputs: Arrays,
        workspace: Workspace,
        held: Mapping[int, HeldProduct] = MappingProxyType({}),
    ) -> None:
        self._plan, self._frame = body.plan, frame_of(body.plan)
        self._block = _block(self._frame, workspace)
        outside = (*outputs[: body.carries], *inputs[body.carries :])
        self._operand = {
            body.plan.views[variable.view].register: outside[int(variable.name)]
            for variable in body.plan.variables
        }
        self.fields: Mapping[str, int] = {f.name: f.view for f in body.plan.fields}
        self.before: list[NativeLaunch] = []
        made: list[Launch] = []
        used = self._frame.size_bytes
        for number, launch in enumerate(body.launches):
            if number in held:
                size = held[number].size_bytes
                made.append(self._with_held(held[number], launch, self._block[used : used + size]))
                used += size
            else:
                made.append(self._bound(launch))
        self.chain: Chain = join(tuple(made))

    def field(self, name: str) -> Array:
        """Return an entry of the xs or ys, in the frame."""
        return self._view(self.fields[name])

    def _with_held(self, product: HeldProduct, launch: PlannedLaunch, kept: Array) -> Launch:
        a, b = [self._view(view) for view in launch.inputs]
        if product.gemm.is_swapped:
            a, b = b, a
        pack, step = product.launches((a, b, self._view(launch.outputs[0])), kept)
        self.before.append(pack)
        return step

    def _bound(self, launch: PlannedLaunch) -> Launch:
        from actors.kernels.catalogue import binders  # which has this kernel, too

        own = None if launch.workspace is None else self._view(launch.workspace)
        return binders()[launch.kernel].bind(
            MappingProxyType(dict(launch.attrs)),
            tuple([self._view(view) for view in launch.inputs]),
            tuple([self._view(view) for view in launch.outputs]),
            own,
        )

    def _view(self, index: int) -> Array:
        view: View = self._plan.views[index]
        offset = self._frame.offsets_bytes[view.register]
        if offset < 0:
            operand = self._operand[view.register]
            block = operand.reshape(-1).view(np.uint8)
            return view_on(block, view.offset_bytes, view.type, view.strides_bytes)
        return view_on(self._block, offset + view.offset_bytes, view.type, view.strides_bytes)


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
            [(m.target[None], m.source[t : t + 1]) for m in moves if not m.is_out],
            [(m.target[t : t + 1], m.source) for m in moves if m.is_out],
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
    if not runtime.is_on() or len(step.chain) != 1:
        return None
    (whole,) = step.chain
    if not isinstance(whole, (JoinedLaunches, NativeLaunch)):
        return None
    function, argument = (
        (runtime.chain_runner(), whole.address)
        if isinstance(whole, JoinedLaunches)
        else (whole.function, whole.arguments)
    )
    try:
        loop = runtime.address_in("scan.c", "af_scan")
    except CompilerError:
        return None
    words = [w for new, old in firsts for w in (address(new), address(old), 0, 0, new.nbytes)]
    for is_out in (False, True):
        for move in moves:
            if move.is_out is is_out:
                entry = move.source if is_out else move.target
                steps = (entry.nbytes, 0) if is_out else (0, entry.nbytes)
                words += [address(move.target), address(move.source), *steps, entry.nbytes]
    block = argument_block(words)
    outs = sum([move.is_out for move in moves])
    first, last = (order[0], order.step) if len(order) else (0, 1)
    begin = JoinedLaunches(tuple(step.before))
    keep = (step, begin, block, [array for pair in firsts for array in pair], list(moves))

    def explain(status: int) -> str:
        at = whole.launches[whole.running] if isinstance(whole, JoinedLaunches) else whole
        return str(at.error(status))

    return native_launch(
        loop,
        (
            *(function, argument, runtime.chain_runner(), begin.address),
            *(len(order), first, last),
            *(len(firsts), len(moves) - outs, outs, ctypes.addressof(block)),
        ),
        keep,
        explain,
    )


SCAN_KERNELS = (ScanKernel(),)
