"""A comparison as Markdown: one line per engine and row, and how each was set up."""

from __future__ import annotations

from collections.abc import Iterable

from actorflow.bench.results import Bench, Measured, RowResult

_HEAD = (
    "| row | engine | ms/step | items/s | ours is | GFLOP/s | of fp32 peak | peak RSS | above state"
    " | first step |"
)
_RULE = "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|"
_IDLE = 0.05


def markdown(bench: Bench) -> str:
    """Return the whole report."""
    machine = bench.machine
    peaks = ", ".join([f"{name} {gflops:.0f}" for name, gflops in machine.gemm_gflops.items()])
    lines = [
        f"{machine.processor}, {machine.num_cores} cores; fp32 products of 2048 x 2048 reach"
        f" {machine.peak_gflops:.0f} GFLOP/s ({peaks or 'nothing was measured'}).",
        "",
        _HEAD + (" cold | busy |" if _has_extras(bench) else ""),
        _RULE + ("--:|--:|" if _has_extras(bench) else ""),
    ]
    for result in bench.rows:
        lines += _lines(result, machine.peak_gflops, has_extras=_has_extras(bench))
    lines += ["", *_summary(bench), "", *_notes(bench)]
    return "\n".join(lines) + "\n"


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
        lines += [
            f"- {name}: {m.engine} burned {m.idle_share:.0%} of a core while others ran"
            for m in _engines(result)
            if m.idle_share > _IDLE
        ]
    return lines


def _notes(bench: Bench) -> list[str]:
    """Say how it was measured, and each engine's settings once."""
    settings: dict[str, dict[str, None]] = {}
    for result in bench.rows:
        for m in _engines(result):
            settings.setdefault(f"{m.engine} {m.variant}".strip(), {})[m.settings] = None
    return [
        "Medians over groups of steps; the engines take turns, each in a process of its own, after"
        " the losses of the first 10 steps were found equal (1e-4 in fp32, 2e-2 in bf16). GFLOP/s"
        " are those of the model: 2 m n k of each matrix product, once forward and once for each"
        " operand whose gradient is needed, products of causal attention at half, nothing else."
        " Peak RSS is that of the process; above state is the peak while steps run, less imports,"
        " parameters and optimizer state. First step is from the start of the process to the first"
        " loss, with warm caches. In bf16 the rival is torch with autocast.",
        "",
        *[f"- {name}: {'; or '.join(texts)}" for name, texts in settings.items()],
        "- rivals run with MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_"
        " raised and OMP_NUM_THREADS at the number of cores; of several variants the fastest is"
        " shown",
    ]
