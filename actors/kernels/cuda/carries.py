"""Where the carries of a loop lie from step to step, so that a step copies none of them.

A body writes a carry by a launch of its own, because it may read the old value after the new one
is made. On a device each step has its own calls, on addresses of its own. So the new value can be
made where the next step reads it, and that launch is left out:

    a result of the step, too    it is read in the stacked results, in the entry of the step
    else, and the body saves     the stack of what carries were before each step has an entry for
    the carry before the step    the next one: it is made there
    else                         in two places by turns, of which one is the result of the loop
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actors.kernels.common.kernel import is_dense
from compiler.contract.plan import SubPlan, frame_of
from compiler.contract.plan_tables import Launch, View
from compiler.contract.types import RegisterId

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class MovedCarry:
    """A carry that no step copies; registers, launches and fields are those of the body.

    `source` is the register of the new value, in which it begins at `offset_bytes`. `entry` is the
    field of results that it is, `saved` that of the value before the step; "" where there is none.
    `write` is the launch that would write the carry, `save` the one that would save it, or -1.
    """

    number: int
    register: RegisterId
    source: RegisterId
    offset_bytes: int
    size_bytes: int
    entry: str
    saved: str
    write: int
    save: int

    @property
    def spare_bytes(self) -> int:
        """Scratch for the second of two places, if they take turns."""
        return 0 if self.entry or self.saved else aligned(self.size_bytes)


def aligned(size_bytes: int) -> int:
    """Return the bytes after which another place begins."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def moved_carries(body: SubPlan, is_whole: Callable[[str], bool]) -> tuple[MovedCarry, ...]:
    """Return the carries of a body that no step needs to copy.

    `is_whole` says whether the entries of a field of results are written where they are stacked.
    """
    variables = {v.name: body.plan.views[v.view] for v in body.plan.variables}
    carries: list[MovedCarry] = []
    for number in range(body.carries):
        carry = variables.get(str(number))
        moved = None if carry is None else _moved(body, number, carry, is_whole)
        # Two carries of one value would want it in two places.
        if moved and moved.source not in [other.source for other in carries]:
            carries.append(moved)
    return tuple(carries)


def _moved(
    body: SubPlan, number: int, carry: View, is_whole: Callable[[str], bool]
) -> MovedCarry | None:
    views, launches = body.plan.views, body.launches
    writes = [i for i, x in enumerate(launches) if carry.register in _registers(body, x.outputs)]
    if len(writes) != 1 or launches[writes[0]].op != "carry":
        return None
    (write,) = writes
    source = views[launches[write].inputs[1]]
    entry = _field_at(body, source)
    if not (_is_same(source, carry) and (is_whole(entry) if entry else _is_alone(body, source))):
        return None
    after = launches[write + 1 :]
    if _touches(body, carry, after) or _touches(body, source, [_writer(x) for x in after]):
        return None
    saved, save = "", -1
    for i, launch in enumerate(launches[:write]):
        if launch.op != "copy" or views[launch.inputs[0]] != carry:
            continue
        field = _field_at(body, views[launch.outputs[0]])
        others = [x for j, x in enumerate(launches) if j != i]
        if field and is_whole(field) and not _touches(body, views[launch.outputs[0]], others):
            saved, save = field, i
            break
    place = source.register, source.offset_bytes, carry.type.size_bytes
    return MovedCarry(number, carry.register, *place, entry, saved, write, save)


def _registers(body: SubPlan, views: tuple[int, ...]) -> list[int]:
    return [body.plan.views[view].register for view in views]


def _is_same(source: View, carry: View) -> bool:
    """Return whether views have the same bytes for the same values, one after the other."""
    is_row_major = is_dense(source.type.shape, source.strides_bytes, source.type.dtype.itemsize)
    alike = source.type == carry.type and source.strides_bytes == carry.strides_bytes
    return alike and is_row_major and source.type.size_bytes > 0


def _field_at(body: SubPlan, view: View) -> str:
    """Return the field of results that a view is; "" for none."""
    fields = [f for f in body.plan.fields if f.name.startswith("out")]
    return next((f.name for f in fields if body.plan.views[f.view] == view), "")


def _is_alone(body: SubPlan, view: View) -> bool:
    """Return whether a view is in the frame, and all else of its register lies within it."""
    plan, (begin, end) = body.plan, view.extent
    if frame_of(plan).offsets_bytes[view.register] < 0:
        return False
    if view.register in _registers(body, tuple([f.view for f in plan.fields])):
        return False
    same = [other.extent for other in plan.views if other.register == view.register]
    return all([begin <= first and last <= end for first, last in same])


def _writer(launch: Launch) -> Launch:
    """Return a launch without what it reads."""
    return replace(launch, inputs=())


def _written(launch: Launch) -> tuple[int, ...]:
    return launch.outputs if launch.workspace is None else (*launch.outputs, launch.workspace)


def _touches(body: SubPlan, view: View, launches: Sequence[Launch]) -> bool:
    """Return whether launches read or write bytes of a view."""
    begin, end = view.extent
    touched = [body.plan.views[v] for x in launches for v in (*x.inputs, *_written(x))]
    return any(
        [
            other.register == view.register and other.extent[0] < end and begin < other.extent[1]
            for other in touched
        ]
    )
