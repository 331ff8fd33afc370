"""A comparison as PNG: how many times as long each rival takes. The owner of matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from actorflow.bench.results import Bench
from compiler.errors import ActorflowError

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
