"""A GPU's loop over a body, and its choice between two, as calls without the host.

A device makes a graph of a chain, and replays it: so a loop is what its steps put there, and costs
no call of the host. An entry of the xs or ys is read and written where it lies, unless that is at
an odder address than the frame's: then it is copied into the frame, or out of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operands,
    refuse_unplanned,
    require_plan,
    steps_of,
)
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    DeviceCall,
    KernelText,
    LaunchCalls,
    RunKernel,
    file_text,
)
from actors.kernels.cuda.carries import MovedCarry, aligned, moved_carries
from actors.kernels.cuda.kernel import (
    CudaKernel,
    CudaPlan,
    DeviceView,
    DeviceViews,
    Gpu,
    PlacedViews,
    Scratch,
    on_device,
)
from actors.kernels.cuda.movement import ELEMENT_TYPES
from compiler.contract.errors import InternalError
from compiler.contract.plan import SubPlan, frame_of
from compiler.contract.plan_tables import Launch
from compiler.contract.types import RegisterId

_EVEN = 16
"""Kernels move up to so many bytes at once, where addresses allow it."""

MOST_LAUNCHES = 1 << 18
"""Of all steps together: a graph of more takes longer to make than anyone waits."""

_COPY_NS = 1_500.0
"""What a small copy takes in a graph."""


Binders = Callable[[str], Mapping[str, CudaKernel]]
"""Returns every kernel for a GPU by its name in the plan, those of loops and branches among
them."""


def plan_scan(
    binders: Binders, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan a run of a sub-plan for every entry of an axis, on dense operands.

    It asks for the frame of the body.

    A carry lies beside its first value, not over it: a launch has as many calls wherever its
    operands lie, for it is bound a second time where ways of a call are tried. No step copies a
    carry that can lie where it is made (`carries`).
    """
    body = attrs["body"]
    if not isinstance(body, SubPlan):  # a device is chosen before there is a plan
        return KernelPlan(KernelNeeds(duration_ns=_COPY_NS * steps_of(attrs)), refuse_unplanned)
    if not all([x.is_dense for x in (*inputs, *outputs)]):
        return None
    if steps_of(attrs) * len(body.launches) > MOST_LAUNCHES:
        return None
    moved, copies = _carries_of(body), _COPY_NS * len(_copied(body))
    left_out = [body.launches[i].duration_ns for i in _left_out(moved)]
    # The first values, the last ones, and those that are saved all together.
    ends = _COPY_NS * (body.carries + 2 * len(moved))
    needs = KernelNeeds(
        workspace_bytes=_workspace_bytes(body),
        duration_ns=steps_of(attrs) * (body.duration_ns - sum(left_out) + copies) + ends,
    )
    order = range(steps_of(attrs))[:: -1 if attrs["reverse"] else 1]

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        needed = needs.workspace_bytes
        size = 0 if workspace is None else workspace.type.size_bytes
        if size < needed:
            raise InternalError(f"a loop needs {needed} bytes of workspace and got {size}")
        operands = on_device(inputs), on_device(outputs)
        steps = BodyCalls(gpu, binders, body, *operands, workspace)
        return tuple(_LoopCalls(steps, body, order).calls())

    return KernelPlan(needs, bind)


def _carries_of(body: SubPlan) -> tuple[MovedCarry, ...]:
    return moved_carries(body, lambda field: field not in _copied(body))


def _left_out(moved: tuple[MovedCarry, ...]) -> frozenset[int]:
    """Return the launches of a body that would copy its carries."""
    return frozenset([i for carry in moved for i in (carry.write, carry.save) if i >= 0])


def _frame_bytes(body: SubPlan) -> int:
    """Return where the second places of carries begin in the workspace of a loop."""
    return aligned(frame_of(body.plan).size_bytes)


def _workspace_bytes(body: SubPlan) -> int:
    return _frame_bytes(body) + sum([carry.spare_bytes for carry in _carries_of(body)])


def _copied(body: SubPlan) -> dict[str, int]:
    """Return the views of the entries that a step copies, by the name of their field."""
    views, fields = body.plan.views, {f.name: f.view for f in body.plan.fields}
    return {name: v for name, v in fields.items() if views[v].type.size_bytes % _EVEN}


class BodyCalls:
    """The calls of each step of a body, on addresses."""

    def __init__(
        self,
        gpu: Gpu,
        binders: Binders,
        body: SubPlan,
        inputs: DeviceViews,
        outputs: DeviceViews,
        workspace: DeviceView | None,
    ) -> None:
        self._binders = binders
        self._gpu, self._body, self._plan = gpu, body, body.plan
        self._inputs, self._outputs = inputs, outputs
        self._frame = frame_of(body.plan)
        self._base = 0 if workspace is None else workspace.address
        if self._frame.size_bytes and workspace is None:
            raise InternalError(f"a body needs a frame of {self._frame.size_bytes} bytes, got none")
        outside = (*outputs[: body.carries], *inputs[body.carries :])
        self._address = {
            self._plan.views[v.view].register: outside[int(v.name)].address
            for v in self._plan.variables
        }
        self._copied = _copied(body)
        self._entries = {
            f.name: (self._plan.views[f.view], self._stacked(f.name)) for f in self._plan.fields
        }

    def _stacked(self, name: str) -> DeviceView:
        """Return the operand or output that has the entries of a field."""
        is_out = name.startswith("out")
        return self._outputs[int(name[3:])] if is_out else self._inputs[int(name)]

    def calls(
        self, at: int, left_out: Container[int] = ()
    ) -> Iterator[DeviceCall | AlternativeCalls]:
        """Yield the calls of one step but those of launches that are left out.

        Those of step -1 keep xs and ys in the frame.
        """
        copied = self._copied if at >= 0 else {}
        moves = [self._copy(name, view, at) for name, view in copied.items()]
        yield from [copy for is_out, copy in moves if not is_out]
        for number, launch in enumerate(self._body.launches):
            if number not in left_out:
                yield from self._bound(launch, at)
        yield from [copy for is_out, copy in moves if is_out]

    def put(self, register: RegisterId, address: int) -> None:
        """Let a register of the body begin at an address from now on."""
        self._address[register] = address

    @property
    def workspace(self) -> int:
        """Where the frame begins."""
        return self._base

    def carry(self, number: int) -> tuple[DeviceView, DeviceView]:
        """Return the first and the last value of a carry."""
        return self._inputs[number], self._outputs[number]

    def entry(self, field: str, at: int) -> int:
        """Return where the entry of a step lies among those of a field: operands are dense."""
        stacked = self._stacked(field)
        return stacked.address + at * (stacked.type.size_bytes // stacked.shape[0])

    def result(self, number: int) -> DeviceView:
        """Return where step -1 leaves a result."""
        (view,) = [f.view for f in self._plan.fields if f.name == f"out{number}"]
        return self._view(view, -1)

    def _copy(self, name: str, view: int, at: int) -> tuple[bool, CopyBytes]:
        inside, size = self._view(view, -1).address, self._plan.views[view].type.size_bytes
        entry = self.entry(name, at)
        is_out = name.startswith("out")
        ends = (entry, inside) if is_out else (inside, entry)
        return is_out, CopyBytes(*ends, size)

    def _bound(self, launch: Launch, at: int) -> LaunchCalls:
        workspace = None if launch.workspace is None else self._view(launch.workspace, at)
        inputs = tuple([self._view(view, at) for view in launch.inputs])
        outputs = tuple([self._view(view, at) for view in launch.outputs])
        operands = [tuple([view.as_operand for view in views]) for views in (inputs, outputs)]
        kernel, attrs = self._binders(self._gpu.name)[launch.kernel], dict(launch.attrs)
        plan = require_plan(kernel, MappingProxyType(attrs), *operands)
        return plan.bind(inputs, outputs, workspace)

    def _view(self, index: int, at: int) -> DeviceView:
        """Return a view of a step; -1 means the frame, whatever entry it is of."""
        view = self._plan.views[index]
        offset = self._frame.offsets_bytes[view.register]
        base = self._address.get(view.register, self._base + offset)
        device_view = DeviceView(base + view.offset_bytes, view.type, view.strides_bytes)
        # Constants and carries are the same bytes in every step.
        if at < 0 or offset < 0:
            return device_view
        for name, (whole, stacked) in self._entries.items():
            size = whole.type.size_bytes
            inside = view.offset_bytes - whole.offset_bytes
            if whole.register == view.register and 0 <= inside < size and name not in self._copied:
                return replace(device_view, address=stacked.address + at * size + inside)
        return device_view


class _LoopCalls:
    """The calls of all steps of a loop, whose carries lie elsewhere in each (`carries`)."""

    def __init__(self, steps: BodyCalls, body: SubPlan, order: Sequence[int]) -> None:
        """Run the steps in an order of their entries."""
        self._steps, self._order, self._num_carries = steps, order, body.carries
        self._moved = {carry.number: carry for carry in _carries_of(body)}
        self._spare: dict[int, int] = {}
        address = steps.workspace + _frame_bytes(body)
        for number, carry in self._moved.items():
            self._spare[number] = address
            address += carry.spare_bytes

    def calls(self) -> Iterator[DeviceCall | AlternativeCalls]:
        """Yield them in order."""
        yield from self._first_values()
        moved = tuple(self._moved.values())
        for step, at in enumerate(self._order):
            for carry in moved:
                self._steps.put(carry.register, self._place(carry, step - 1))
                if not carry.entry:
                    self._steps.put(carry.source, self._place(carry, step) - carry.offset_bytes)
            yield from self._steps.calls(at, _left_out(moved))
        for carry in moved:
            yield from self._last_values(carry)

    def _first_values(self) -> Iterator[DeviceCall]:
        for number in range(self._num_carries):
            first, result = self._steps.carry(number)
            carry = self._moved.get(number)
            target = self._place(carry, -1) if carry else result.address
            if result.type.size_bytes:
                yield CopyBytes(target, first.address, result.type.size_bytes)

    def _place(self, carry: MovedCarry, step: int) -> int:
        """Return where the carry lies that a step made; before step 0 that is the first value."""
        result, last = self._steps.carry(carry.number)[1].address, len(self._order) - 1
        if carry.entry and step >= 0:
            return self._steps.entry(carry.entry, self._order[step])
        if step == last:
            return result
        if carry.saved:
            return self._steps.entry(carry.saved, self._order[step + 1])
        is_turn = carry.entry or (last - step) % 2 == 0
        return result if is_turn else self._spare[carry.number]

    def _last_values(self, carry: MovedCarry) -> Iterator[DeviceCall]:
        """Yield the copies out of the entries of a result that carries are, too."""
        if not (carry.entry and self._order):
            return
        size, steps = carry.size_bytes, range(len(self._order))
        result = self._steps.carry(carry.number)[1].address
        yield CopyBytes(result, self._place(carry, steps[-1]), size)
        if carry.saved and len(steps) > 1:
            # What was before step i is what step i - 1 made, whichever way the loop goes.
            saved = [self._steps.entry(carry.saved, at) for at in self._order]
            made = [self._place(carry, step) for step in steps]
            yield CopyBytes(min(saved[1:]), min(made[:-1]), size * (len(steps) - 1))


# Of the two bodies of a choice both run, and what the flag did not choose is left behind. The host
# would have to wait for the flag to look at it. So the calls of both bodies go into the graph of
# the chain, one after the other in one frame, and a kernel that reads the flag on the device copies
# the results of the one that was chosen: no bit of the other is seen, NaN or not. A bad index
# counts where the flag, and those of the choices around it, chose its body (`StatusWord.guards`).
#
# Conditional nodes of graphs (CUDA 12.4) would leave the other body out. They are not used: a body
# of theirs is a graph of its own, with fewer kinds of nodes, that the driver takes apart in its own
# way, and nothing that runs without a GPU could show that it does what is meant.

_THREADS = 256
_BODIES = (("then", 1), ("otherwise", 0))
"""The bodies of a choice, each with the value of the flag that chooses it."""


@functools.cache
def choose_text(item: int) -> KernelText:
    """Return the kernel that copies elements of 1, 2, 4, 8 or 16 bytes where a bool says so."""
    text = file_text("choose.cuh").replace("NAME_TYPE", ELEMENT_TYPES[item])
    about = f"copies elements of {item} bytes where a bool says so"
    return KernelText.of("af_choose", text, ("NAME",), about, has_exchanges=False)


def plan_cond(
    binders: Binders, gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands
) -> CudaPlan | None:
    """Plan runs of two sub-plans, of which the results of one are kept, on dense operands.

    It asks for the larger frame: a body's results are taken before the next one runs.
    """
    bodies = [body for name, _ in _BODIES if isinstance(body := attrs[name], SubPlan)]
    moved_bytes = sum([2 * operand.type.size_bytes for operand in outputs])
    copies = 2 * len(outputs) * gpu.call_ns + gpu.bytes_ns(moved_bytes)
    if len(bodies) != len(_BODIES):  # a device is chosen before there are plans
        return KernelPlan(KernelNeeds(duration_ns=copies), refuse_unplanned)
    if not all([x.is_dense for x in (*inputs, *outputs)]):
        return None
    needs = KernelNeeds(
        workspace_bytes=max([frame_of(body.plan).size_bytes for body in bodies]),
        duration_ns=sum([body.duration_ns for body in bodies]) + copies,
    )

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        sources, targets = on_device(inputs), on_device(outputs)
        calls: list[DeviceCall | AlternativeCalls] = []
        # One frame for both: each body's results are copied out before the next one runs.
        for body, (_, condition) in zip(bodies, _BODIES, strict=True):
            guard = sources[0].address, condition
            steps = BodyCalls(gpu, binders, body, sources, targets, workspace)
            calls += [_guarded(call, guard) for call in steps.calls(-1)]
            calls += _kept(
                gpu, [*zip(targets, map(steps.result, range(len(targets))), strict=True)], guard
            )
        return tuple(calls)

    return KernelPlan(needs, bind)


def _kept(
    gpu: Gpu, moves: list[tuple[DeviceView, DeviceView]], guard: tuple[int, int]
) -> Iterator[RunKernel]:
    """Yield copies of results that do something where the flag chose their body."""
    most = 4 * gpu.num_sms * gpu.threads_per_sm // _THREADS
    for target, source in moves:
        size = target.type.size_bytes
        if not size:
            continue
        # The widest element, up to 16 bytes, that addresses and size are multiples of.
        item = math.gcd(max(ELEMENT_TYPES), target.address, source.address, size)
        text, count = choose_text(item), size // item
        words = (target.address, source.address, count, *guard)
        blocks = min(-(-count // _THREADS), most)
        yield RunKernel(text, text.kernels[0], blocks, _THREADS, words)


def _guarded(
    call: DeviceCall | AlternativeCalls, guard: tuple[int, int]
) -> DeviceCall | AlternativeCalls:
    """Return a call whose bad indices count where a bool has a value; ways report none."""
    if not isinstance(call, RunKernel) or call.status is None:
        return call
    return replace(call, status=replace(call.status, guards=(*call.status.guards, guard)))
