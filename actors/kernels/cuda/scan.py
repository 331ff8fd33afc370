"""A GPU's loop over a body: the calls of all steps, one after the other.

A device makes a graph of a chain, and replays it: so a loop is what its steps put there, and costs
no call of the host. An entry of the xs or ys is read and written where it lies, unless that is at
an odder address than the frame's: then it is copied into the frame, or out of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from actors.kernels.cuda.calls import CopyBytes, DeviceCall, LaunchCalls, OneOf
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.views import DeviceView, DeviceViews, PlacedView, on_device
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.scan import steps_of
from compiler.errors import InternalError
from compiler.plan import Launch
from compiler.sub_plan import SubPlan, frame_of

_EVEN = 16
"""Kernels move up to so many bytes at once, where addresses allow it."""

MOST_LAUNCHES = 1 << 18
"""Of all steps together: a graph of more takes longer to make than anyone waits."""

_COPY_NS = 1_500.0
"""What a small copy takes in a graph."""


@dataclass(frozen=True, slots=True)
class CudaScan:
    """Runs a sub-plan for every entry of an axis. It takes dense operands."""

    gpu: Gpu
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
        steps = BodyCalls(self.gpu, body, on_device(inputs), on_device(outputs), workspace)
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
        body: SubPlan,
        inputs: DeviceViews,
        outputs: DeviceViews,
        workspace: DeviceView | None,
    ) -> None:
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

    def calls(self, at: int) -> Iterator[DeviceCall | OneOf]:
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
        entry = self._stacked(name).address + at * size
        is_out = name.startswith("out")
        ends = (entry, inside) if is_out else (inside, entry)
        return is_out, CopyBytes(*ends, size)

    def _bound(self, launch: Launch, at: int) -> LaunchCalls:
        from actors.kernels.cuda.catalogue import binders  # which has this kernel, too

        own = None if launch.workspace is None else self._view(launch.workspace, at)
        return binders(self._gpu.name)[launch.kernel].bind(
            MappingProxyType(dict(launch.attrs)),
            tuple([self._view(view, at) for view in launch.inputs]),
            tuple([self._view(view, at) for view in launch.outputs]),
            own,
        )

    def _view(self, index: int, at: int) -> DeviceView:
        """Return a view of a step; -1 means the frame, whatever entry it is of."""
        view = self._plan.views[index]
        offset = self._frame.offsets_bytes[view.register]
        base = self._operand[view.register] if offset < 0 else self._base + offset
        found = DeviceView(base + view.offset_bytes, view.type, view.strides_bytes)
        if at < 0 or offset < 0:
            return found
        for name, (whole, stacked) in self._entries.items():
            size = whole.type.size_bytes
            inside = view.offset_bytes - whole.offset_bytes
            if whole.register == view.register and 0 <= inside < size and name not in self._copied:
                return replace(found, address=stacked.address + at * size + inside)
        return found
