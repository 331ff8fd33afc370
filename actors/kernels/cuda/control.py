"""A GPU's loop over a body, and its choice between two, as calls without the host.

A device makes a graph of a chain, and replays it: so a loop is what its steps put there, and costs
no call of the host. An entry of the xs or ys is read and written where it lies, unless that is at
an odder address than the frame's: then it is copied into the frame, or out of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from actors.kernels.common.kernel import Attrs, KernelNeeds, Operands, plan_in, steps_of
from actors.kernels.cuda.calls import (
    AlternativeCalls,
    CopyBytes,
    DeviceCall,
    KernelText,
    LaunchCalls,
    RunKernel,
)
from actors.kernels.cuda.kernel import (
    CudaKernel,
    DeviceView,
    DeviceViews,
    Gpu,
    PlacedView,
    on_device,
)
from actors.kernels.cuda.movement import ELEMENT_TYPES
from compiler.contract.errors import InternalError
from compiler.contract.plan import SubPlan, frame_of
from compiler.contract.plan_tables import Launch

_EVEN = 16
"""Kernels move up to so many bytes at once, where addresses allow it."""

MOST_LAUNCHES = 1 << 18
"""Of all steps together: a graph of more takes longer to make than anyone waits."""

_COPY_NS = 1_500.0
"""What a small copy takes in a graph."""


Binders = Callable[[str], Mapping[str, CudaKernel]]
"""Returns every kernel for a GPU by its name in the plan, those of loops and branches among
them."""


@dataclass(frozen=True, slots=True)
class CudaScan:
    """Runs a sub-plan for every entry of an axis. It takes dense operands."""

    gpu: Gpu
    binders: Binders
    name: str = "cuda.scan"
    op: str = "scan"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the frame of the body.

        A carry lies beside its first value, not over it: a launch has as many calls wherever its
        operands lie, for it is bound a second time where ways of a call are tried.
        """
        body = attrs["body"]
        if not isinstance(body, SubPlan):  # a device is chosen before there is a plan
            return KernelNeeds(duration_ns=_COPY_NS * steps_of(attrs))
        if not all([x.is_dense for x in (*inputs, *outputs)]):
            return None
        if steps_of(attrs) * len(body.launches) > MOST_LAUNCHES:
            return None
        copies = _COPY_NS * len(_copied(body))
        return KernelNeeds(
            workspace_bytes=frame_of(body.plan).size_bytes,
            duration_ns=steps_of(attrs) * (body.duration_ns + copies) + _COPY_NS * body.carries,
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> LaunchCalls:
        """Return the calls of all steps. Raises InternalError where the body is no plan."""
        body = attrs["body"]
        if not isinstance(body, SubPlan):
            raise InternalError("a loop is bound without the plan of its body")
        steps = BodyCalls(
            self.gpu, self.binders, body, on_device(inputs), on_device(outputs), workspace
        )
        order = range(steps_of(attrs))[:: -1 if attrs["reverse"] else 1]
        return (*steps.begin(), *[call for at in order for call in steps.calls(at)])


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
        self._operand = {
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

    def begin(self) -> Iterator[DeviceCall]:
        """Yield the copies of the first carries."""
        for new, old in zip(self._outputs, self._inputs[: self._body.carries], strict=False):
            if new.type.size_bytes:
                yield CopyBytes(new.address, old.address, new.type.size_bytes)

    def calls(self, at: int) -> Iterator[DeviceCall | AlternativeCalls]:
        """Yield the calls of one step; those of step -1 keep xs and ys in the frame."""
        copied = self._copied if at >= 0 else {}
        moves = [self._copy(name, view, at) for name, view in copied.items()]
        yield from [copy for is_out, copy in moves if not is_out]
        for launch in self._body.launches:
            yield from self._bound(launch, at)
        yield from [copy for is_out, copy in moves if is_out]

    def result(self, number: int) -> DeviceView:
        """Return where step -1 leaves a result."""
        (view,) = [f.view for f in self._plan.fields if f.name == f"out{number}"]
        return self._view(view, -1)

    def _copy(self, name: str, view: int, at: int) -> tuple[bool, CopyBytes]:
        inside, size = self._view(view, -1).address, self._plan.views[view].type.size_bytes
        # Entries lie one after the other: operands are dense.
        entry = self._stacked(name).address + at * size
        is_out = name.startswith("out")
        ends = (entry, inside) if is_out else (inside, entry)
        return is_out, CopyBytes(*ends, size)

    def _bound(self, launch: Launch, at: int) -> LaunchCalls:
        workspace = None if launch.workspace is None else self._view(launch.workspace, at)
        return self._binders(self._gpu.name)[launch.kernel].bind(
            MappingProxyType(dict(launch.attrs)),
            tuple([self._view(view, at) for view in launch.inputs]),
            tuple([self._view(view, at) for view in launch.outputs]),
            workspace,
        )

    def _view(self, index: int, at: int) -> DeviceView:
        """Return a view of a step; -1 means the frame, whatever entry it is of."""
        view = self._plan.views[index]
        offset = self._frame.offsets_bytes[view.register]
        base = self._operand[view.register] if offset < 0 else self._base + offset
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
    text = Path(__file__).with_name("choose.cuh").read_text(encoding="utf-8")
    text = text.replace("NAME_TYPE", ELEMENT_TYPES[item])
    about = f"copies elements of {item} bytes where a bool says so"
    return KernelText.of("af_choose", text, ("NAME",), about, has_exchanges=False)


@dataclass(frozen=True, slots=True)
class CudaCond:
    """Runs two sub-plans, and keeps the results of one. It takes dense operands."""

    gpu: Gpu
    binders: Binders
    name: str = "cuda.cond"
    op: str = "cond"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Ask for the larger frame: a body's results are taken before the next one runs."""
        bodies = [body for name, _ in _BODIES if isinstance(body := attrs[name], SubPlan)]
        moved_bytes = sum([2 * operand.type.size_bytes for operand in outputs])
        copies = 2 * len(outputs) * self.gpu.call_ns + self.gpu.bytes_ns(moved_bytes)
        if len(bodies) != len(_BODIES):  # a device is chosen before there are plans
            return KernelNeeds(duration_ns=copies)
        if not all([x.is_dense for x in (*inputs, *outputs)]):
            return None
        return KernelNeeds(
            workspace_bytes=max([frame_of(body.plan).size_bytes for body in bodies]),
            duration_ns=sum([body.duration_ns for body in bodies]) + copies,
        )

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> LaunchCalls:
        """Return the calls of both bodies. Raises InternalError where one is no plan."""
        sources, targets = on_device(inputs), on_device(outputs)
        calls: list[DeviceCall | AlternativeCalls] = []
        # One frame for both: each body's results are copied out before the next one runs.
        for name, condition in _BODIES:
            guard = sources[0].address, condition
            body = BodyCalls(
                self.gpu, self.binders, plan_in(attrs, name), sources, targets, workspace
            )
            calls += [_guarded(call, guard) for call in body.calls(-1)]
            calls += self._kept(
                [*zip(targets, map(body.result, range(len(targets))), strict=True)], guard
            )
        return tuple(calls)

    def _kept(
        self, moves: list[tuple[DeviceView, DeviceView]], guard: tuple[int, int]
    ) -> Iterator[RunKernel]:
        """Yield copies of results that do something where the flag chose their body."""
        most = 4 * self.gpu.num_sms * self.gpu.threads_per_sm // _THREADS
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
