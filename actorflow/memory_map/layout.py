"""A plan's arena as boxes: offset x time, each with a kind, a name and the line that made it.

Time is launches, those of all chains one after the other in the order of the plan, as in
`Register.interval`. So chains that run at the same time stand side by side, and the curve of live
bytes is that of this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from compiler.accounting import Share, chain_launches, shares
from compiler.plan import Actor, Launch, Plan
from compiler.plan_memory import DeviceMemory
from compiler.types import Phase, RegisterId
from memory.liveness import live_bytes


class BoxKind(Enum):
    """What a box is, as the legend says it, and its colour.

    State is blue, forward orange, backward red, what is made again green.
    """

    PARAMETER = "parameter", "#3f6fb5"
    OPTIMIZER = "optimizer state", "#86abe0"
    SCRATCH = "gradient sum", "#5a57a6"
    OTHER_VARIABLE = "other variable", "#7c8796"
    CONSTANT = "constant", "#b9c0ca"
    STAGING = "staging of snapshots", "#a58a6a"
    SLOT = "slot of data or metrics", "#d9b928"
    CROSSING = "value between chains", "#a45fb0"
    ACTIVATION = "activation kept for backward", "#e8842c"
    RECOMPUTED = "activation made again", "#2f9e6e"
    FORWARD = "temporary of forward", "#f6c789"
    BACKWARD = "gradient, temporary of backward", "#d2504a"
    UPDATE = "temporary of update", "#8f3b63"
    WORKSPACE = "workspace of a kernel", "#3d4450"


COLOURS = {kind: kind.value[1] for kind in BoxKind}

PHASE_COLOURS = {
    Phase.FORWARD: "#f0a04b",
    Phase.RECOMPUTE: "#2f9e6e",
    Phase.BACKWARD: "#d2504a",
    Phase.UPDATE: "#8f3b63",
}
"""A colour per phase of a launch."""

_OF_SHARE: dict[Share, BoxKind] = {
    share: BoxKind[share.name] for share in Share if share is not Share.TEMPORARY
}


@dataclass(frozen=True, slots=True)
class Box:
    """One slot of a register: bytes [offset, offset + size) during launches [begin, end).

    `writer` is the first launch that writes it, None for what a host port or nobody writes.
    """

    name: str
    kind: BoxKind
    offset_bytes: int
    size_bytes: int
    begin: int
    end: int
    writer: int | None


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """What is drawn of an arena of a plan.

    `steps` are the launches on the axis of time, each with its actor; `horizon` is the end of time
    in launches, at least 1; `curve` are pairs of launch and the bytes that are live from there on.
    """

    plan: Plan
    device: str
    account: DeviceMemory
    boxes: tuple[Box, ...]
    steps: tuple[tuple[Actor, Launch], ...]
    horizon: int
    curve: tuple[tuple[int, int], ...]

    @property
    def peak_holders(self) -> tuple[Box, ...]:
        """The boxes that are live at the peak, largest first."""
        at = self.account.peak_launch
        live = [box for box in self.boxes if box.begin <= at < box.end]
        return tuple(sorted(live, key=lambda box: (-box.size_bytes, box.offset_bytes)))


def map_memory(plan: Plan, arena: int = 0) -> MemoryMap:
    """Return the boxes of one arena of a plan. O(registers + operands of launches)."""
    launches = chain_launches(plan)
    writer, readers = _accesses(plan, launches)
    of = shares(plan)
    boxes: list[Box] = []
    for register in plan.registers:
        if register.arena != arena or not register.size_bytes:
            continue
        made = writer.get(register.id)
        read = readers.get(register.id, ())
        kind = _OF_SHARE.get(of[register.id]) or _temporary(launches, made, read)
        begin, end = register.interval
        for slot, offset in enumerate(register.offsets_bytes):
            name = f"{register.name}[{slot}]" if register.num_slots > 1 else register.name
            boxes.append(Box(name, kind, offset, register.size_bytes, begin, end, made))
    times, live = live_bytes(
        [box.begin for box in boxes], [box.end for box in boxes], [box.size_bytes for box in boxes]
    )
    return MemoryMap(
        plan=plan,
        device=str(plan.arenas[arena].device),
        account=plan.memory[arena],
        boxes=tuple(boxes),
        steps=launches,
        horizon=max([1, len(launches), *[box.end for box in boxes]]),
        curve=tuple(zip(times.tolist(), live.tolist(), strict=True)),
    )


def _accesses(
    plan: Plan, launches: Sequence[tuple[Actor, Launch]]
) -> tuple[dict[RegisterId, int], dict[RegisterId, list[int]]]:
    """Return the first launch that writes each register, and all that read it."""
    writer: dict[RegisterId, int] = {}
    readers: dict[RegisterId, list[int]] = {}
    for index, (_, launch) in enumerate(launches):
        for view in launch.inputs:
            readers.setdefault(plan.views[view].register, []).append(index)
        scratch = () if launch.workspace is None else (launch.workspace,)
        for view in (*launch.outputs, *scratch):
            writer.setdefault(plan.views[view].register, index)
    return writer, readers


def _temporary(
    launches: Sequence[tuple[Actor, Launch]], made: int | None, readers: Sequence[int]
) -> BoxKind:
    """Return the kind of a temporary by the phases of who makes and who reads it."""
    phase = Phase.FORWARD if made is None else launches[made][1].phase
    if phase is Phase.FORWARD and any([launches[i][1].phase is not phase for i in readers]):
        return BoxKind.ACTIVATION
    return BoxKind.RECOMPUTED if phase is Phase.RECOMPUTE else BoxKind[phase.name]
