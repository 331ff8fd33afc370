"""The memory map as a PNG, for a report or a review; Pillow draws it (extra `cli`).

The same boxes and colours as the page, with the largest holders of the peak listed beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

from actorflow.memory_map.layout import COLOURS, PHASE_COLOURS, BoxKind, MemoryMap, map_memory
from compiler.errors import ActorflowError
from compiler.plan import Plan
from memory.report import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

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
