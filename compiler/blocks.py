"""Check that what a launch copies as one block of bytes is what its operands say, and no more.

Such a launch (`compiler.ops.copies.COPY_BLOCK`) names tensors, and moves the bytes from the first
to the end of the last. So each has to lie as far from the first as its copy does from the first
copy, and nothing else may lie in the bytes that are written. Bytes between tensors are read along,
whoever has them, and nobody reads what is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from compiler.errors import InternalError
from compiler.ops.copies import COPY_BLOCK
from compiler.places import Extent
from compiler.plan import Launch, Plan
from compiler.types import RegisterId


def check_blocks(plan: Plan, extents: Sequence[Extent]) -> None:
    """Check all launches of a plan that copy blocks; `extents` are those of its views.

    What is read from one register after another lies in one slot each. O(views + operands).

    Raises InternalError naming the launch that copies anything else.
    """
    blocks = [
        launch for actor in plan.actors for launch in actor.launches if launch.op == COPY_BLOCK.name
    ]
    if not blocks:
        return
    shown: dict[RegisterId, list[int]] = {}
    for index, view in enumerate(plan.views):
        shown.setdefault(view.register, []).append(index)
    for launch in blocks:
        fault = _fault(plan, extents, launch, shown)
        if fault:
            line = plan.sources[launch.source]
            raise InternalError(f"{launch.op} of {launch.scope!r} ({line}) {fault}")


def _fault(
    plan: Plan,
    extents: Sequence[Extent],
    launch: Launch,
    shown: dict[RegisterId, list[int]],
) -> str:
    """Return what is wrong with a block, or nothing."""
    if not launch.inputs or len(launch.inputs) != len(launch.outputs):
        return "has another number of tensors than of copies"
    homes = [{plan.views[v].register for v in views} for views in (launch.inputs, launch.outputs)]
    if any([plan.registers[register].num_slots != 1 for register in (*homes[0], *homes[1])]):
        return "lies in registers of several slots"
    if len({plan.registers[r].arena for r in homes[0]}) > 1 or len(homes[1]) > 1:
        return "reads several arenas, or fills several registers"
    if not all([extents[view].is_dense for view in (*launch.inputs, *launch.outputs)]):
        return "copies what has gaps"
    starts = [[_address(plan, v) for v in views] for views in (launch.inputs, launch.outputs)]
    distances = [[address - own[0] for address in own] for own in starts]
    if distances[0] != distances[1]:
        return "has copies that do not lie as the tensors do"
    written = [extents[view] for view in launch.outputs]
    if any([before.end > after.start for before, after in pairwise(written)]):
        return "has copies that are not one after another"
    begin, end = written[0].start, written[-1].end
    if dict(launch.attrs).get("size_bytes") != end - begin:
        return f"moves other bytes than the {end - begin} that its tensors take"
    (register,) = homes[1]
    inside = [v for v in shown[register] if extents[v].start < end and begin < extents[v].end]
    if not {*inside} <= {*launch.outputs}:
        return "writes over what lies between its copies"
    return ""


def _address(plan: Plan, view: int) -> int:
    """Return where a view begins in its arena."""
    shown = plan.views[view]
    return plan.registers[shown.register].offsets_bytes[0] + shown.offset_bytes
