"""Curves over steps as SVG: a faint band from least to largest, and a smooth line in it.

A series may have a million points, of which a screen shows some hundreds: `condensed` keeps the
least, the largest and the mean of each stretch, so that no peak is lost. Text is escaped here, so a
name from a file is never markup. Colours are classes, which the page's style gives for light and
dark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from actorflow.cli.page import text

WIDTH, HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 34
NUM_COLOURS = 8
_TICKS = 5
_LARGEST, _LEAST_SIZE = 1e300, 1e-290
"""Within these the differences of numbers, and their shares, are finite and not zero."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some points that lie side by side: where they begin, their mean, least and largest value."""

    step: float
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart; `colour` is a number of the palette."""

    name: str
    colour: int
    stretches: tuple[Stretch, ...]


def condensed(points: npt.ArrayLike, most: int) -> tuple[Stretch, ...]:
    """Return points [n, 2], ordered by step, as at most so many stretches of equally many of them.

    Values that are not finite, or above 1e300, are left out.
    """
    pairs = np.asarray(points, np.float64).reshape(-1, 2)
    steps, values = pairs[(np.abs(pairs) <= _LARGEST).all(axis=1)].T
    if not values.size:
        return ()
    starts = np.arange(0, values.size, -(-values.size // most))
    ends = np.append(starts[1:], values.size)
    columns = (
        steps[ends - 1],
        np.add.reduceat(values, starts) / (ends - starts),
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
    return tuple(map(Stretch, *[column.tolist() for column in columns]))


def smoothed(values: Sequence[float], half_width: int) -> list[float]:
    """Return means over the neighbours, as many on the left as on the right.

    Near an end there are fewer of both, and at an end none: so the ends of a curve stay where they
    are, and a straight line stays straight.
    """
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    last = len(values) - 1
    means = []
    for i in range(len(values)):
        reach = min(half_width, i, last - i)
        means.append((sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1))
    return means


def chart(title: str, curves: Sequence[Curve], half_width: int) -> str:
    """Return curves over steps as one SVG with axes, a title for screen readers, and no script."""
    shown = [curve for curve in curves if curve.stretches]
    stretches = [s for curve in shown for s in curve.stretches]
    if not stretches:
        return f"<p>{text(title)}: no finite value</p>"
    x_low, x_high = _widened(min(s.step for s in stretches), max(s.step for s in stretches))
    y_low, y_high = _widened(min(s.low for s in stretches), max(s.high for s in stretches))

    def x(step: float) -> str:
        return f"{_LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT):.1f}"

    def y(value: float) -> str:
        return f"{HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * _INNER:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)} over steps">'
    ]
    for tick, label in labelled(ticks(y_low, y_high)):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(tick)}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick)}" class="y">{label}</text>')
    for tick, label in labelled([tick for tick in ticks(x_low, x_high) if tick == round(tick)]):
        place = HEIGHT - _BOTTOM + 16
        parts.append(f'<text x="{x(tick)}" y="{place}" class="x">{label}</text>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2}" y="{HEIGHT - 4}" class="x">step</text>')
    for curve in shown:
        colour, points = f"c{curve.colour % NUM_COLOURS}", curve.stretches
        if any([s.low < s.high for s in points]):
            upper = [f"{x(s.step)} {y(s.high)}" for s in points]
            lower = [f"{x(s.step)} {y(s.low)}" for s in reversed(points)]
            parts.append(f'<path class="band {colour}" d="M{"L".join([*upper, *lower])}Z"/>')
        means = [s.mean for s in points]
        line = zip(points, smoothed(means, half_width), strict=True)
        path = "L".join([f"{x(s.step)} {y(mean)}" for s, mean in line])
        # A single point has no length; with a round end it is a dot.
        dot, path = (" dot", f"{path}h0") if len(points) == 1 else ("", path)
        parts.append(f'<path class="line{dot} {colour}" d="M{path}"/>')
    return "".join([*parts, "</svg>"])


_INNER = HEIGHT - _TOP - _BOTTOM


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return bounds that differ by so much that there are round numbers between them."""
    size = max(abs(low), abs(high))
    if high - low > 1e-12 * size and size > _LEAST_SIZE:
        return low, high
    gap = 0.05 * size if size > _LEAST_SIZE else 1.0
    return low - gap, high + gap


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step) + 1)][: 4 * _TICKS]


def labelled(values: Sequence[float]) -> list[tuple[float, str]]:
    """Return numbers, the larger ones last, each with a label that tells it from the others."""
    gap = min([b - a for a, b in itertools.pairwise(values)], default=0.0)
    # Two digits more than the first that differs, for steps of 2.5.
    digits = 2 + math.ceil(math.log10(max(map(abs, values)) / gap)) if gap > 0 else 4
    return [(value, number(value, max(4, min(digits, 15)))) for value in values]


def number(value: float, digits: int = 4) -> str:
    """Return a number in a few letters: 12k, 0.25, 3e-07."""
    size = abs(value)
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if factor <= size < 1e12:
            return f"{value / factor:.{digits}g}{unit}"
    return f"{value:.{digits}g}"
