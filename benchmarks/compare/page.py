"""What a comparison measured, as one page without scripts: dots with ranges, and the table.

It is made from what `--json` writes, so an older file can be drawn too; what it lacks is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from actorflow.cli.charts import number
from actorflow.cli.page import cells, static_page, table, text

_WIDTH, _HEIGHT, _RADIUS = 260, 18, 4
_HEADS = (
    "engine",
    "time of a step",
    "ms",
    "of peak",
    "actorflow is",
    "peak RSS",
    "first step",
    "stolen, others",
)

Values = Mapping[str, Any]


def bench_page(values: Values, day: date) -> str:
    """Return the page of the results of one comparison, as JSON has them, and of its day."""
    machine = values["machine"]
    peaks = [_peak(machine, "fp32", ""), _peak(machine, "bf16", "bf16_")]
    body = [
        "<h1>actorflow bench</h1>",
        f"<p>{day.isoformat()}; {text(machine['processor'])}, {machine['cores']} cores"
        f"; products of 2048 x 2048 reach {' and '.join(peaks)}.</p>",
        "<p>A dot is the median of a step's time, its line reaches from the fastest to the slowest"
        " round. Lines of one table have one scale, which begins at 0.</p>",
        *[f"<p>{text(sentence)}.</p>" for sentence in machine.get("untold", ())],
        *[_row(row) for row in values["rows"]],
    ]
    missing = values.get("not_measured")
    if missing:
        why = text(values["why_not_measured"])
        body.append(f"<p>Not measured ({why}): {text(', '.join(missing))}.</p>")
    return static_page("actorflow bench", "\n".join(body))


def _peak(machine: Values, precision: str, prefix: str) -> str:
    rates = machine.get(f"{prefix}gemm_gflops", {}).items()
    libraries = ", ".join([f"{text(name)} {number(gflops)}" for name, gflops in rates])
    reached = f"{number(machine.get(f'{prefix}peak_gflops') or 0)} GFLOP/s in {precision}"
    return f"{reached} ({libraries or 'not measured'})"


def _row(row: Values) -> str:
    """Return one row: ours first, the others by their time."""
    rivals = sorted(row["rivals"].items(), key=lambda item: item[1]["ms"])
    ours = [("actorflow", row)] if row["ms"] is not None else []
    engines = [*ours, *rivals]
    parts = [f"<h2>{text(row['row'])} {text(row['precision'])}</h2>"]
    if engines:
        longest = max([one.get("high_ms") or one["ms"] for _, one in engines])
        parts.append(table(_HEADS, [_line(name, one, row, longest) for name, one in engines]))
    said = [*row["failures"], *[text for _, one in engines for text in one.get("warnings", ())]]
    parts += [f"<p>{text(sentence)}</p>" for sentence in said]
    return "".join(parts)


def _line(name: str, one: Values, row: Values, longest_ms: float) -> str:
    is_ours, fraction = one is row, one.get("peak_fraction")
    facts = [
        f"{one['ms']:.4g}{_range(one)}",
        "" if fraction is None else f"{fraction:.0%}",
        "" if is_ours or not row["ms"] else f"{one['ms'] / row['ms']:.2f} x as fast",
        f"{one['peak_rss_mb']:.0f} MB",
        f"{one['first_step_s']:.2f} s",
        ", ".join([_share(one.get(f"{name}_share")) for name in ("stolen", "others")]),
    ]
    label = text(f"{name} {one['variant']}".strip())
    dot = _dot(one, 0 if is_ours else 1, longest_ms)
    return f'<tr><th scope="row">{label}</th><td>{dot}</td>{cells(facts)}</tr>'


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _range(one: Values) -> str:
    low, high = one.get("low_ms"), one.get("high_ms")
    return "" if low is None or high is None else f" ({low:.4g} to {high:.4g})"


def _dot(one: Values, colour: int, longest_ms: float) -> str:
    """Return a dot, and a line from the fastest to the slowest round where they are known."""
    room, middle = _WIDTH - 2 * _RADIUS, _HEIGHT / 2
    low, at, high = [
        f"{_RADIUS + room * (one.get(name) or one['ms']) / longest_ms:.1f}"
        for name in ("low_ms", "ms", "high_ms")
    ]
    label = f"{one['ms']:.4g} ms{_range(one)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="width:min({_WIDTH}px,36vw)" role="img"'
        f' aria-label="{label}"><path class="grid" d="M{_RADIUS} {middle}H{_WIDTH - _RADIUS}"/>'
        f'<path class="line c{colour}" d="M{low} {middle}H{high}"/>'
        f'<path class="line dot c{colour}" d="M{at} {middle}h0"/></svg>'
    )
