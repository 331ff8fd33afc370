"""`actorflow plan --memory`: the memory of a plan as a picture: which bytes, when, for whom.

`map_memory` turns an arena into boxes of offset x launches. `render_html` puts them on a page,
which page.js draws; `write_png` draws them with Pillow (extra `cli`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actorflow.cli.page import numbered_strings, scripted_page
from compiler.contract.accounting import MemoryCategory, chain_launches, memory_categories
from compiler.contract.codec import printable
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.plan import Plan
from compiler.contract.plan_tables import Actor, DeviceMemory, Launch
from compiler.contract.types import Phase, RegisterId
from memory.liveness import live_bytes
from memory.report import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont


# The boxes. Time is launches, those of all chains one after the other in the order of the plan, as
# in `Register.interval`. So chains that run at the same time stand side by side, and the curve of
# live bytes is that of this order.


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

_OF_SHARE: dict[MemoryCategory, BoxKind] = {
    share: BoxKind[share.name] for share in MemoryCategory if share is not MemoryCategory.TEMPORARY
}


@dataclass(frozen=True, slots=True)
class Box:
    """One slot of a register: bytes [offset, offset + size) during launches [begin, end).

    `writer` is the first launch that writes it, None for what a host port or nobody writes.
    """

    register: RegisterId
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
    categories = memory_categories(plan)
    boxes: list[Box] = []
    for register in plan.registers:
        if register.arena != arena or not register.size_bytes:
            continue
        write = writer.get(register.id)
        reads = readers.get(register.id, ())
        kind = _OF_SHARE.get(categories[register.id]) or _temporary(launches, write, reads)
        begin, end = register.interval
        for slot, offset in enumerate(register.offsets_bytes):
            name = f"{register.name}[{slot}]" if register.num_slots > 1 else register.name
            size = register.size_bytes
            boxes.append(Box(register.id, name, kind, offset, size, begin, end, write))
    times, live = live_bytes(
        [box.begin for box in boxes], [box.end for box in boxes], [box.size_bytes for box in boxes]
    )
    block = plan.arenas[arena]
    return MemoryMap(
        plan=plan,
        device=str(block.device if block.place == block.device.place else block.place),
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


# The page needs nothing beside it: no network, no fonts, no server. The numbers go into it as JSON,
# names once each.

_KINDS = tuple(BoxKind)
_PHASES = tuple(PHASE_COLOURS)


def render_html(plan: Plan, without: Plan | None = None) -> str:
    """Return the page of a plan's memory, beside that of the plan `without` recomputation."""
    return scripted_page(map_data(plan, without), "page.js", "map_page.js")


def map_data(plan: Plan, without: Plan | None = None) -> dict[str, object]:
    """Return what page.js draws: kinds, phases, and a map per arena of one plan or two."""
    plans = [plan] if without is None else [plan, without]
    captions = [""] if without is None else ["with recomputation", "without recomputation"]
    maps = [
        _as_json(map_memory(each, arena), caption)
        for each, caption in zip(plans, captions, strict=True)
        for arena in range(len(each.arenas))
    ]
    return {
        "kinds": [[*kind.value] for kind in _KINDS],
        "phases": [[phase.value, colour] for phase, colour in PHASE_COLOURS.items()],
        "maps": maps,
    }


def _as_json(shown: MemoryMap, caption: str) -> dict[str, object]:
    strings, number = numbered_strings()
    account = shown.account
    boxes = [_row(box, number(box.name)) for box in shown.boxes]
    steps = [
        [
            *(number(" + ".join(x.made_of)), number(x.scope)),
            *(number(str(shown.plan.sources[x.source])), number(actor.name)),
            _PHASES.index(x.phase),
        ]
        for actor, x in shown.steps
    ]
    return {
        "title": printable(shown.plan.name),
        "caption": caption,
        "device": shown.device,
        "arena": account.peak_bytes,
        "bound": account.lower_bound_bytes,
        "peak": account.peak_launch,
        "live": account.peak_live_bytes,
        "text": account.text,
        "parts": [[name, size] for name, size in account.parts if size],
        "horizon": shown.horizon,
        "boxes": boxes,
        "steps": steps,
        "curve": shown.curve,
        "strings": list(strings),
    }


def _row(box: Box, name: int) -> list[int]:
    writer = -1 if box.writer is None else box.writer
    kind = _KINDS.index(box.kind)
    place = [box.offset_bytes, box.size_bytes, box.begin, box.end]
    return [kind, *place, name, writer, box.register]


# The PNG: boxes and colours of the page, with the largest holders of the peak listed beside.

_SIZE = (2000, 1250)
_MAP = (110, 140, 1440, 850)
"""The map in pixels: left, top, width, height."""
_CURVE = (110, 1070, 1440, 125)
_SIDE = 1590
_STRIP = 14
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_NUM_HOLDERS = 24
_NAME_LETTERS = 30

_INK, _SOFT, _LINE, _WASH, _RED = "#1c232d", "#5d6876", "#b5bdc7", "#f5f7f9", "#c4161c"


class MissingPillow(ActorflowError):
    """A PNG was asked for, and Pillow is not installed."""


def write_png(plan: Plan, path: str | Path) -> None:
    """Draw the first arena of a plan into a file.

    Raises:
        MissingPillow: Pillow is not installed.
        OSError: the file cannot be written.
    """
    image = draw(map_memory(plan))
    with Path(path).open("wb") as file:
        image.save(file, "PNG")


def check_pillow() -> None:
    """Raise MissingPillow where there is no Pillow that can write text."""
    try:
        from PIL import features
    except ImportError as error:
        raise MissingPillow(
            "a memory map as .png needs Pillow, which is not installed; install it with"
            ' pip install "actorflow[cli]", or ask for a .html file, which needs nothing'
        ) from error
    if not features.check("freetype2"):
        raise MissingPillow(
            "a memory map as .png needs a Pillow with FreeType; reinstall it with"
            ' pip install --force-reinstall "actorflow[cli]"'
        )


def draw(shown: MemoryMap) -> Image:
    """Return the picture of a memory map. Raises MissingPillow."""
    check_pillow()
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", _SIZE, "white")
    small, large = [cast("FreeTypeFont", ImageFont.load_default(size)) for size in (17, 30)]
    canvas = _Canvas(ImageDraw.Draw(image), small, large, shown)
    canvas.headline()
    canvas.boxes()
    canvas.strip()
    canvas.axes()
    canvas.curve()
    canvas.peak()
    canvas.holders(canvas.legend())
    return image


@dataclass(frozen=True, slots=True)
class _Canvas:
    """What is drawn on, and where a launch and an offset lie on it."""

    pen: ImageDraw
    small: FreeTypeFont
    large: FreeTypeFont
    shown: MemoryMap

    def x(self, launch: float) -> float:
        left, _, width, _ = _MAP
        return left + width * launch / self.shown.horizon

    def y(self, offset: float, area: tuple[int, int, int, int] = _MAP) -> float:
        _, top, _, height = area
        return top + height * (1 - offset / max(1, self.shown.account.peak_bytes))

    def text(self, x: float, y: float, text: str, colour: str = _INK, anchor: str = "la") -> None:
        self.pen.text((x, y), text, colour, self.small, anchor)

    def headline(self) -> None:
        shown, account = self.shown, self.shown.account
        parts = [f"{name} {format_bytes(size)}" for name, size in account.parts if size]
        self.pen.text((30, 22), f"Memory map of plan {shown.plan.name}", _INK, self.large)
        total = format_bytes(account.peak_bytes)
        self.text(30, 64, f"arena {shown.device}: {total} = {' + '.join(parts)}")
        bound = format_bytes(account.lower_bound_bytes)
        self.text(30, 88, f"lower bound {bound}; {account.text}")

    def boxes(self) -> None:
        left, top, width, height = _MAP
        self.pen.rectangle((left, top, left + width, top + height), _WASH)
        for box in self.shown.boxes:
            x0, x1 = round(self.x(box.begin)), round(self.x(box.end))
            y0 = round(self.y(box.offset_bytes + box.size_bytes))
            y1 = round(self.y(box.offset_bytes))
            is_framed = x1 - x0 > 3 and y1 - y0 > 4
            frame = _pale(COLOURS[box.kind]) if is_framed else None
            corner = (x0, y0, max(x0, x1 - 1), max(y0, y1 - 1))
            self.pen.rectangle(corner, COLOURS[box.kind], frame)
            if y1 - y0 > 19 and x1 - x0 > 90:
                name = _cut(box.name, (x1 - x0 - 10) // 10)
                self.text(x0 + 6, (y0 + y1) / 2, name, _ink_on(COLOURS[box.kind]), "lm")

    def strip(self) -> None:
        _, top, _, height = _MAP
        for index, (_, launch) in enumerate(self.shown.steps):
            corner = (self.x(index), top + height + 2, self.x(index + 1), top + height + _STRIP)
            self.pen.rectangle(corner, PHASE_COLOURS[launch.phase])

    def axes(self) -> None:
        left, top, _, height = _MAP
        unit, size = _unit(self.shown.account.peak_bytes)
        for tick in _ticks(self.shown.account.peak_bytes / size, 12):
            y = self.y(tick * size)
            self.pen.line((left - 7, y, left, y), _LINE, 2)
            self.text(left - 12, y, f"{tick:g}", _SOFT, "rm")
        for tick in _ticks(self.shown.horizon, 12):
            if tick == int(tick) and tick:
                self.text(self.x(tick), top + height + _STRIP + 6, f"{int(tick):,}", _SOFT, "ma")
        self.text(left, top - 8, f"offset [{unit}]", _SOFT, "ls")
        below = top + height + _STRIP + 6
        self.text(left - 12, below, "launch", _SOFT, "ra")

    def curve(self) -> None:
        left, top, width, height = _CURVE
        base = top + height
        before = float(base)
        for (launch, live), (end, _) in pairwise(self.shown.curve):
            x0, x1, y = self.x(launch), self.x(end), self.y(live, _CURVE)
            self.pen.rectangle((x0, y, x1, base), "#dfe6ef")
            self.pen.line((x0, before, x0, y, x1, y), COLOURS[BoxKind.PARAMETER], 2)
            before = y
        bound = self.y(self.shown.account.lower_bound_bytes, _CURVE)
        for x in range(left, left + width, 16):
            self.pen.line((x, bound, x + 8, bound), _INK, 1)
        self.text(left + width, bound - 4, "lower bound", _INK, "rs")
        unit, size = _unit(self.shown.account.peak_bytes)
        for tick in _ticks(self.shown.account.peak_bytes / size, 3):
            y = self.y(tick * size, _CURVE)
            self.pen.line((left - 7, y, left, y), _LINE, 2)
            self.text(left - 12, y, f"{tick:g}", _SOFT, "rm")
        self.text(left, base + 10, f"live bytes [{unit}] over launches of all chains", _SOFT)

    def peak(self) -> None:
        account = self.shown.account
        x = self.x(account.peak_launch + 0.5)
        self.pen.line((x, _MAP[1] - 6, x, _MAP[1] + _MAP[3]), _RED, 3)
        self.pen.line((x, _CURVE[1] - 6, x, _CURVE[1] + _CURVE[3]), _RED, 3)
        label = f"peak: launch {account.peak_launch}, {format_bytes(account.peak_live_bytes)}"
        half = self.small.getlength(label) / 2
        middle = min(max(x, _MAP[0] + half + 130), _MAP[0] + _MAP[2] - half)
        self.text(middle, _MAP[1] - 10, label, _RED, "ms")

    def legend(self) -> int:
        """Draw the kinds and phases that occur; return where the next line goes."""
        y = _MAP[1]
        present = {box.kind for box in self.shown.boxes}
        for kind in [kind for kind in BoxKind if kind in present]:
            self.chip(y, COLOURS[kind], kind.value[0])
            y += 26
        y += 12
        self.text(_SIDE, y, "strip below the map: phase of a launch", _SOFT)
        y += 28
        phases = {launch.phase for _, launch in self.shown.steps}
        for phase in [phase for phase in PHASE_COLOURS if phase in phases]:
            self.chip(y, PHASE_COLOURS[phase], phase.value)
            y += 26
        return y + 16

    def chip(self, y: int, colour: str, text: str) -> None:
        self.pen.rectangle((_SIDE, y + 2, _SIDE + 16, y + 18), colour)
        self.text(_SIDE + 26, y, text)

    def holders(self, y: int) -> None:
        live = self.shown.peak_holders
        self.text(_SIDE, y, f"held at the peak: {len(live)} tensors", _SOFT)
        room = min(_NUM_HOLDERS, max(1, (_SIZE[1] - y - 80) // 24))
        for box in live[:room]:
            y += 24
            self.pen.rectangle((_SIDE, y + 3, _SIDE + 12, y + 15), COLOURS[box.kind])
            self.text(_SIDE + 112, y, format_bytes(box.size_bytes), _INK, "ra")
            self.text(_SIDE + 124, y, _cut(box.name, _NAME_LETTERS))
        rest = sum([box.size_bytes for box in live[room:]])
        if rest:
            self.text(
                _SIDE, y + 28, f"and {format_bytes(rest)} in {len(live) - room} others", _SOFT
            )


def _unit(most: int) -> tuple[str, int]:
    power = min(len(_UNITS) - 1, max(0, (max(1, most - 1).bit_length() - 1) // 10))
    return _UNITS[power], 1 << (10 * power)


def _ticks(most: float, wanted: int) -> list[float]:
    """Return round numbers from 0 to `most`, about as many as wanted."""
    raw = max(most / wanted, 1e-9)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(s * scale for s in (1, 2, 5, 10) if s * scale >= raw)
    return [step * k for k in range(int(most / step) + 1)]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: max(1, most - 3)]}..."


def _channels(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def _pale(colour: str) -> tuple[int, int, int]:
    """Return a colour half way to white, for the frame of a box."""
    red, green, blue = [(channel + 255) // 2 for channel in _channels(colour)]
    return red, green, blue


def _ink_on(colour: str) -> str:
    """Return dark ink on a light colour and white on a dark one, by the weights of ITU-R BT.601."""
    red, green, blue = _channels(colour)
    return _INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else "white"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the memory map to those of `plan`."""
    parser.add_argument(
        "--memory", metavar="FILE", help="draw the arena over time: FILE.html or FILE.png"
    )
    parser.add_argument(
        "--without",
        metavar="PLAN",
        help="plan file of the same job without a memory budget, drawn for comparison (.html)",
    )


def drawing(
    options: argparse.Namespace, load: Callable[[str], Plan]
) -> Callable[[Plan, Plan | None], str] | None:
    """Return what draws a plan and says so, or None where no map is asked for.

    It takes the plan and, to be drawn beside where `--without` names no other, the same one without
    recomputation if there is one.
    Checked here, before anything is compiled: the suffix, the folder, Pillow, the plan beside.

    Raises:
        CompileError: the file is neither .html nor .png, or `--without` does not fit.
        OSError: its folder is not there, or the plan beside cannot be read.
        MissingPillow: a .png is asked for, and Pillow is not installed.
    """
    if options.memory is None:
        if options.without is not None:
            raise CompileError(
                "--without draws a second plan for comparison: it needs --memory FILE.html"
            )
        return None
    path = Path(options.memory)
    if path.suffix not in (".html", ".png"):
        raise CompileError(
            f"--memory {path}: expected a file that ends in .html or .png, came"
            f" {path.suffix or 'no suffix'}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such directory", str(path.parent))
    if path.suffix == ".png":
        if options.without is not None:
            raise CompileError("--without draws two maps side by side, on a page: use .html")
        check_pillow()
    other_plan = None if options.without is None else load(options.without)

    def draw(plan: Plan, store_all: Plan | None) -> str:
        if path.suffix == ".png":
            write_png(plan, path)
        else:
            path.write_text(render_html(plan, other_plan or store_all), encoding="utf-8")
        return f"memory map in {path} ({format_bytes(path.stat().st_size)})"

    return draw
