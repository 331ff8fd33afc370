"""Predictions and what was measured, as PNG: a bar from least to most, a dot for what came."""

from __future__ import annotations

from pathlib import Path

from gpu.results import CheckResult

_DPI = 110


def write_png(result: CheckResult, file: Path) -> bool:
    """Draw every prediction that was measured, by the middle of its range; False without any.

    Raises ImportError where matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [v for v in result.verdicts if v.measured and v.prediction.high > 0]
    if not rows:
        return False
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(rows)))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, verdict in enumerate(rows):
        low, high = verdict.prediction.low, verdict.prediction.high
        middle = (low * high) ** 0.5 or high
        axes.plot(
            [low / middle or 1e-2, high / middle], [place, place], color="#9db4c0", linewidth=7
        )
        colour = "#2a7f62" if verdict.word == "hit" else "#c1292e"
        axes.plot([verdict.measured / middle], [place], "o", color=colour)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [f"{v.prediction.name}  {v.measured:.4g}" for v in rows])
    axes.invert_yaxis()
    axes.set_xlabel("measured by the middle of what was expected (log)")
    figure.tight_layout()
    figure.savefig(file, dpi=_DPI)
    return True
