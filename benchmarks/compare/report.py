"""What a comparison measured: as values, as JSON, as Markdown and as PNG (owner of matplotlib)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiler.contract.errors import ActorflowError

from .disturbance import LIMIT, Disturbance

MB = 1e6
"""Bytes."""
_IDLE = 0.05
_UNKNOWN = Disturbance()


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine on one row.

    `ms` is the median of the means of `num_chunks` groups of steps. `above_mb` is the peak of the
    resident set while steps run, less what the engine alone takes (its imports) and less parameters
    and optimizer state. `first_step_s` is from the start of the process to the first loss, with
    warm caches; `cold_first_step_s` with empty ones, and None where that was not measured.
    `busy_slowdown` is how much longer a step takes while another process keeps a core busy.
    `idle_share` is the share of a core that the engine burned while others ran. `low_ms` and
    `high_ms` are the medians of the fastest and the slowest round. `host` are means over the turns;
    `num_repeated` turns were run again because of what was stolen, and `num_disturbed` count all
    the same.
    """

    engine: str
    variant: str
    settings: str
    ms: float
    num_chunks: int
    peak_rss_mb: float
    above_mb: float
    first_step_s: float
    cold_first_step_s: float | None = None
    busy_slowdown: float | None = None
    idle_share: float = 0.0
    low_ms: float | None = None
    high_ms: float | None = None
    host: Disturbance = _UNKNOWN
    num_repeated: int = 0
    num_disturbed: int = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be said of what the host did meanwhile."""
        sentences = []
        if self.num_repeated:
            sentences.append(
                f"{self.engine} ran {self.num_repeated} turns again, of which more than {LIMIT:.0%}"
                f" was stolen; {self.host.stolen or 0:.1%} is stolen of those that count,"
                f" {self.num_disturbed} of which are over that limit"
            )
        if (self.host.others or 0.0) > LIMIT:
            sentences.append(
                f"other processes used {self.host.others:.0%} of the cores while {self.engine} ran"
            )
        if self.idle_share > _IDLE:
            sentences.append(
                f"{self.engine} burned {self.idle_share:.0%} of a core while others ran"
            )
        return tuple(sentences)


@dataclass(frozen=True, slots=True)
class RowResult:
    """A row: ours, the rivals, and who failed why. `flops` are those of one step, of the model."""

    row: str
    precision: str
    items: int
    item: str
    flops: float
    ours: Measured | None
    rivals: tuple[Measured, ...]
    failures: tuple[str, ...]

    @property
    def best_rival(self) -> Measured | None:
        """The fastest rival, None where all failed."""
        return min(self.rivals, key=lambda m: m.ms, default=None)

    @property
    def ratio_to_best_rival(self) -> float | None:
        """How many times as fast as the best rival we are."""
        best = self.best_rival
        return None if best is None or self.ours is None else best.ms / self.ours.ms

    def items_per_s(self, measured: Measured) -> float:
        """Return the items of a second."""
        return self.items / measured.ms * 1e3

    def gflops(self, measured: Measured) -> float:
        """Return the model's arithmetic per second, 0 where it is not known."""
        return self.flops / measured.ms / 1e6


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """Where it was measured; the GFLOP/s are those of the best product of 2048^3 by library.

    `untold` are sentences on what the system does not tell of itself.
    """

    processor: str
    num_cores: int
    fp32_gflops: Mapping[str, float]
    bf16_gflops: Mapping[str, float]
    untold: tuple[str, ...] = ()

    def peak_gflops(self, precision: str) -> float:
        """Return the machine's measured peak in a precision, 0 where nothing was measured."""
        gflops = self.fp32_gflops if precision == "fp32" else self.bf16_gflops
        return max(gflops.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Bench:
    """A whole comparison, or what there is of it: rows that are not measured, and why not."""

    machine: MachineInfo
    rows: tuple[RowResult, ...]
    not_measured: tuple[str, ...] = ()
    why: str = ""


def as_json(bench: Bench) -> dict[str, Any]:
    """Return what `--json` writes; numbers that are not known are null."""
    machine = bench.machine
    return {
        "machine": {
            "processor": machine.processor,
            "cores": machine.num_cores,
            "peak_gflops": _rounded(machine.peak_gflops("fp32")),
            "bf16_peak_gflops": _rounded(machine.peak_gflops("bf16")),
            "gemm_gflops": {n: _rounded(g) for n, g in machine.fp32_gflops.items()},
            "bf16_gemm_gflops": {n: _rounded(g) for n, g in machine.bf16_gflops.items()},
            "untold": list(machine.untold),
        },
        "rows": [_row(result, machine.peak_gflops(result.precision)) for result in bench.rows],
        "not_measured": list(bench.not_measured),
        "why_not_measured": bench.why,
    }


def _row(result: RowResult, peak: float) -> dict[str, Any]:
    row: dict[str, Any] = {"row": result.row, "precision": result.precision}
    names = ("ms", "items_per_s", "gflops", "peak_rss_mb", "first_step_s")
    ours = result.ours
    row |= dict.fromkeys(names) if ours is None else _engine(result, ours, peak)
    row["rivals"] = {m.engine: _engine(result, m, peak) for m in result.rivals}
    row["ratio_to_best_rival"] = _rounded(result.ratio_to_best_rival)
    row["failures"] = list(result.failures)
    return row


def _engine(result: RowResult, measured: Measured, peak: float) -> dict[str, Any]:
    gflops = result.gflops(measured) or None
    return {
        "ms": _rounded(measured.ms),
        "low_ms": _rounded(measured.low_ms),
        "high_ms": _rounded(measured.high_ms),
        "items_per_s": _rounded(result.items_per_s(measured)),
        "gflops": _rounded(gflops),
        "peak_fraction": _rounded(gflops / peak if gflops and peak else None),
        "peak_rss_mb": _rounded(measured.peak_rss_mb),
        "above_state_mb": _rounded(measured.above_mb),
        "first_step_s": _rounded(measured.first_step_s),
        "cold_first_step_s": _rounded(measured.cold_first_step_s),
        "busy_slowdown": _rounded(measured.busy_slowdown),
        "idle_share": _rounded(measured.idle_share),
        **{f"{name}_share": _rounded(share) for name, share in asdict(measured.host).items()},
        "repeated_turns": measured.num_repeated,
        "disturbed_turns": measured.num_disturbed,
        "warnings": list(measured.warnings),
        "variant": measured.variant,
        "settings": measured.settings,
    }


def _rounded(number: float | None) -> float | None:
    """Keep five digits; what is not finite is null, for JSON has no word for it."""
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.5g}")


_HEAD = (
    "| row | engine | ms/step | rounds | items/s | ours is | GFLOP/s | of peak | peak RSS"
    " | above state | first step |"
)
_RULE = "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"


def markdown(bench: Bench) -> str:
    """Return the whole report."""
    machine = bench.machine
    lines = [
        f"{machine.processor}, {machine.num_cores} cores; products of 2048 x 2048 reach"
        f" {_peak(machine, 'fp32')} and {_peak(machine, 'bf16')}.",
        "",
        _HEAD + (" cold | busy |" if _has_extras(bench) else ""),
        _RULE + ("--:|--:|" if _has_extras(bench) else ""),
    ]
    for result in bench.rows:
        peak = machine.peak_gflops(result.precision)
        lines += _lines(result, peak, has_extras=_has_extras(bench))
    lines += ["", *_summary(bench), "", *_notes(bench)]
    return "\n".join(lines) + "\n"


def _peak(machine: MachineInfo, precision: str) -> str:
    rates = machine.fp32_gflops if precision == "fp32" else machine.bf16_gflops
    libraries = ", ".join([f"{name} {gflops:.0f}" for name, gflops in rates.items()])
    reached = f"{machine.peak_gflops(precision):.0f} GFLOP/s in {precision}"
    return f"{reached} ({libraries or 'nothing was measured'})"


def launches_markdown(row: str, launches: Iterable[dict[str, str | float]], count: int = 20) -> str:
    """Return the longest launches of a row's plan as a table."""
    lines = [f"{row}: the longest launches", "", "| op | kernel | scope | us | GFLOP/s |"]
    lines.append("|---|---|---|--:|--:|")
    for launch in list(launches)[:count]:
        names = f"| {launch['op']} | {launch['kernel']} | {launch['scope']} "
        lines.append(f"{names}| {launch['us']:.1f} | {launch['gflops']:.1f} |")
    return "\n".join(lines) + "\n"


def _has_extras(bench: Bench) -> bool:
    all_measured = [m for result in bench.rows for m in _engines(result)]
    return any([m.cold_first_step_s or m.busy_slowdown for m in all_measured])


def _engines(result: RowResult) -> tuple[Measured, ...]:
    ours = () if result.ours is None else (result.ours,)
    return (*ours, *sorted(result.rivals, key=lambda m: m.ms))


def _lines(result: RowResult, peak: float, *, has_extras: bool) -> list[str]:
    lines = []
    for measured in _engines(result):
        ratio = measured.ms / result.ours.ms if result.ours else 0.0
        gflops = result.gflops(measured)
        cells = [
            f"{result.row} {result.precision}",
            f"{measured.engine} {measured.variant}".strip(),
            f"{measured.ms:.4g}",
            "" if measured.low_ms is None else f"{measured.low_ms:.4g} to {measured.high_ms:.4g}",
            f"{result.items_per_s(measured):,.0f}",
            f"{ratio:.2f} x" if result.ours and measured is not result.ours else "",
            f"{gflops:.1f}" if gflops else "",
            f"{gflops / peak:.0%}" if gflops and peak else "",
            f"{measured.peak_rss_mb:.0f} MB",
            f"{measured.above_mb:.0f} MB",
            f"{measured.first_step_s:.2f} s",
        ]
        if has_extras:
            cold, busy = measured.cold_first_step_s, measured.busy_slowdown
            cells += ["" if cold is None else f"{cold:.1f} s"]
            cells += ["" if busy is None else f"{busy:.2f} x"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _summary(bench: Bench) -> list[str]:
    lines = []
    for result in bench.rows:
        best, ratio = result.best_rival, result.ratio_to_best_rival
        name = f"{result.row} {result.precision}"
        if best is not None and ratio is not None:
            lines.append(
                f"- {name}: the best rival is {best.engine}; ours is {ratio:.2f} x as fast"
            )
        lines += [f"- {name}: {failure}" for failure in result.failures]
        lines += [f"- {name}: {text}" for m in _engines(result) for text in m.warnings]
    if bench.not_measured:
        lines.append(f"- not measured ({bench.why}): {', '.join(bench.not_measured)}")
    return lines


def _notes(bench: Bench) -> list[str]:
    """Say how it was measured, and each engine's settings once."""
    settings: dict[str, dict[str, None]] = {}
    for result in bench.rows:
        for m in _engines(result):
            settings.setdefault(f"{m.engine} {m.variant}".strip(), {})[m.settings] = None
    return [
        "Medians over groups of steps, beside them the medians of the fastest and the slowest"
        " round; the engines take turns, each in a process of its own, after"
        " the losses of the first 10 steps were found equal (1e-4 in fp32, 2e-2 in bf16). GFLOP/s"
        " are those of the model: 2 m n k of each matrix product, once forward and once for each"
        " operand whose gradient is needed, products of causal attention at half, nothing else."
        " Peak RSS is that of the process; above state is the peak while steps run, less imports,"
        " parameters and optimizer state. First step is from the start of the process to the first"
        " loss, with warm caches. In bf16 the rival is torch with autocast.",
        "",
        *[f"- {text}" for text in bench.machine.untold],
        f"- {_waiting(bench)}",
        *[f"- {name}: {'; or '.join(texts)}" for name, texts in settings.items()],
        "- rivals run with MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_"
        " raised and OMP_NUM_THREADS at the number of cores; of several variants the fastest is"
        " shown",
    ]


def _waiting(bench: Bench) -> str:
    """Say what happened on the host in the turns of the engine to which most happened."""
    hosts = [m.host for result in bench.rows for m in _engines(result)]
    stolen, others, waiting = [
        max([getattr(host, name) or 0.0 for host in hosts], default=0.0)
        for name in ("stolen", "others", "waiting")
    ]
    return (
        f"turns of which other guests of the host stole more than {LIMIT:.0%} are run again, at"
        f" most as many as there are rounds; of an engine's turns they stole at most {stolen:.1%},"
        f" other processes here used at most {others:.0%} of the cores, and a task waited for a"
        f" core in at most {waiting:.0%} of the time"
    )


_WIDTH, _HEIGHT_PER_ROW, _DPI = 8.0, 0.55, 120


class MissingMatplotlib(ActorflowError):
    """A picture is asked for, and matplotlib is not installed."""


def check_matplotlib() -> None:
    """Raise MissingMatplotlib where there is none; imports nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingMatplotlib(
            "--png draws with matplotlib, which is not installed: pip install matplotlib, or ask"
            " for --markdown or --json"
        )


def write_png(bench: Bench, path: Path) -> None:
    """Draw the time of each rival by ours, a group of bars per row, on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [result for result in bench.rows if result.ours is not None]
    engines = list(dict.fromkeys(m.engine for result in rows for m in result.rivals))
    figure = Figure(figsize=(_WIDTH, 1.5 + _HEIGHT_PER_ROW * max(1, len(rows))))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(engines))
    for number, engine in enumerate(engines):
        places, ratios = [], []
        for place, result in enumerate(rows):
            for measured in result.rivals:
                if measured.engine == engine and result.ours is not None:
                    places.append(place + number * height)
                    ratios.append(measured.ms / result.ours.ms)
        axes.barh(places, ratios, height, label=engine)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("time of a step, actorflow = 1 (log)")
    axes.set_yticks(
        [place + 0.4 - height / 2 for place in range(len(rows))],
        [f"{result.row} {result.precision}" for result in rows],
    )
    axes.invert_yaxis()
    if engines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
