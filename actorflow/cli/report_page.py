"""`actorflow report RUN [RUN ...]`: runs as one page: curves, what differs, memory, checkpoints.

The page is one file without scripts, fonts or addresses: it opens anywhere, and names from a
hostile run are text. Its size is bounded whatever the length of a run: see `charts`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actorflow.callbacks.samples import SAMPLES_FILE, SampleSet, read_samples
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.reader import CheckpointRow
from actorflow.cli.charts import NUM_COLOURS, Curve, chart, condensed, number
from actorflow.cli.page import (
    MOST_OF_LINE,
    NO_SCRIPTS,
    WITH_IMAGES,
    cells,
    static_page,
    table,
    text,
)
from actorflow.cli.runs import FileStamps, RunRow, facts_of, run_row, stamps_of, time_text
from actorflow.cli.samples_page import samples_part
from actorflow.cli.series import MetricSeries, Points
from actorflow.compile.prove import read_plan
from actorflow.run.report import METRICS_FILE
from actorflow.run.run_record import PLAN_FILE
from actorflow.run.status import Status
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.files import user_path
from compiler.pipeline.printer import summarise
from memory.report import format_bytes

_MARK = "<!-- actorflow report -->"
"""Begins a page, so that an old page may be replaced, and nothing else."""
_MOST_POINTS = 48_000
"""Of a page; 30 letters each."""
_FEWEST_STRETCHES, _MOST_STRETCHES = 30, 400
"""Of a curve."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="the page (default report.html)"
    )
    parser.add_argument(
        "--smooth",
        type=float,
        default=2.0,
        metavar="PERCENT",
        help="share of a curve that each point is a mean over (default 2; 0: none)",
    )
    parser.add_argument("--json", action="store_true", help="print what is drawn as JSON")


def run(options: argparse.Namespace) -> int:
    """Write the page, and return the exit code.

    Raises CompileError for a file that is there and no report, and OSError.
    """
    if not 0 <= options.smooth <= 100:
        raise CompileError(f"--smooth: expected a share from 0 to 100, came {options.smooth}")
    path = Path(options.out)
    if path.exists() and not _is_report(path):
        raise CompileError(f"{path} is there and is no report; name another file by --out")
    reported = [RunReader(Path(user_path(folder))).read() for folder in options.runs]
    page = page_of(reported, options.smooth)
    path.write_text(page, encoding="utf-8")
    if options.json:
        facts = [
            {"run": one.row.name, "state": one.row.state, "metrics": [*one.series]}
            | {"checkpoints": len(one.checkpoints), "problems": [*one.problems]}
            for one in reported
        ]
        print(json.dumps({"file": str(path), "runs": facts}))
        return 0
    print(f"{path} ({format_bytes(len(page.encode()))}): open it in a browser")
    return 0


def _is_report(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(len(_MARK)) == _MARK


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What a page shows of a run: points by name of the metric, until its reader reads on.

    `plan` are the lines of `actorflow plan`: actors, registers and memory. `samples` are rows that
    the run kept.
    """

    row: RunRow
    series: Mapping[str, Points]
    checkpoints: Sequence[CheckpointRow]
    plan: Sequence[str]
    samples: Sequence[SampleSet]
    problems: Sequence[str]


class RunReader:
    """Reads one run again and again: its metrics on from the last look, its plan when it changed.

    Belongs to one thread at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._series = MetricSeries(folder / METRICS_FILE)
        self._stamps: FileStamps = ()
        self._plan: list[str] = []

    def read(self) -> ReportedRun:
        """Return a run as far as it can be read. Raises FileNotFoundError without its folder."""
        folder = self._folder
        if not folder.is_dir():
            raise FileNotFoundError(2, "no such directory", str(folder))
        row, problems = run_row(folder), []
        series: Mapping[str, Points] = {}
        try:
            self._series.read_on()
            series = self._series
        except FileNotFoundError:
            problems.append("it has no metrics yet")
        except OSError as error:
            problems.append(f"{METRICS_FILE} cannot be read: {error.strerror}")
        checkpoints: list[CheckpointRow] = []
        try:
            checkpoints = list(CheckpointManager(folder).describe())
        except (ActorflowError, OSError) as error:
            problems.append(f"its checkpoints cannot be listed: {error}")
        if row.problem:
            problems.append(row.problem)
        samples: Sequence[SampleSet] = ()
        try:
            samples = read_samples(folder)
        except OSError as error:
            problems.append(f"{SAMPLES_FILE} cannot be read: {error.strerror}")
        return ReportedRun(row, series, checkpoints, self._plan_lines(), samples, problems)

    def _plan_lines(self) -> list[str]:
        stamps = stamps_of(self._folder, PLAN_FILE)
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._plan = summarise(read_plan(str(self._folder / PLAN_FILE)))
            except (ActorflowError, OSError) as error:
                self._plan = [f"{PLAN_FILE} cannot be read: {error}"]
        return self._plan


def page_of(runs: Sequence[ReportedRun], smooth_percent: float) -> str:
    """Return the whole page."""
    policy = f"{NO_SCRIPTS}; {WITH_IMAGES}"
    return _MARK + static_page(title_of(runs), body_of(runs, smooth_percent), policy)


def title_of(runs: Sequence[ReportedRun]) -> str:
    """Return the title of a page of runs."""
    return ", ".join([run.row.name for run in runs])


def body_of(runs: Sequence[ReportedRun], smooth_percent: float) -> str:
    """Return the main part of a page: curves, what differs, and each run."""
    names = list(dict.fromkeys([name for run in runs for name in _shown(run)]))
    share = _MOST_POINTS // max(1, len(names) * len(runs))
    most = max(_FEWEST_STRETCHES, min(_MOST_STRETCHES, share))
    charts = []
    for name in names:
        curves = [
            Curve(run.row.name, colour, condensed(run.series.get(name, ()), most))
            for colour, run in enumerate(runs)
        ]
        longest = max([len(curve.stretches) for curve in curves])
        picture = chart(name, curves, round(longest * smooth_percent / 200))
        charts.append(f"<figure><figcaption>{text(name)}</figcaption>{picture}</figure>")
    about = f"Lines: means over {smooth_percent:g} % of a curve. Bands: least to largest value."
    parts = [
        f"<h1>{text(title_of(runs))}</h1>",
        _legend(runs),
        f'<div class="charts">{"".join(charts)}</div>' if charts else "<p>No metrics.</p>",
        f'<p class="soft">{about}</p>' * bool(charts),
        _facts(runs),
        *[_details(run) for run in runs],
    ]
    return "\n".join(parts)


def _shown(run: ReportedRun) -> list[str]:
    """Return the names of metrics, less the last values of which the means are there."""
    hidden = {f"{name}_last" for name in run.series}
    return [name for name in run.series if name not in hidden]


def _legend(runs: Sequence[ReportedRun]) -> str:
    items = [
        f'<li><span class="key c{i % NUM_COLOURS}" aria-hidden="true"></span>'
        f"{text(run.row.name)}: {text(run.row.state)}"
        f"{f', step {progress_text(run.row.status)}' if run.row.status else ''}</li>"
        for i, run in enumerate(runs)
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def progress_text(status: Status) -> str:
    """Return the step of a run, and its last one where that is known."""
    total = "" if status.total_steps is None else f" of {status.total_steps:,}"
    return f"{status.step:,}{total}"


def _facts(runs: Sequence[ReportedRun]) -> str:
    """Return tables of options and results: what differs, and all of it."""
    records = [run.row.record for run in runs]
    sides = [
        facts_of(run.row) if record is not None and record.starts else {}
        for run, record in zip(runs, records, strict=True)
    ]
    rows, known = _beside(sides), [bool(side) for side in sides]
    # A run that says nothing of itself differs in nothing.
    differing = {
        name: row for name, row in rows.items() if len({*itertools.compress(row, known)}) > 1
    }
    heads = ["", *[run.row.name for run in runs]]
    parts = ["<h2>Results</h2>", _table(heads, _beside([_results(run) for run in runs]))]
    if len(runs) > 1:
        parts += ["<h2>What differs</h2>", _table(heads, differing)]
    return "".join([*parts, _folded("Options, data, code and machine", heads, rows)])


def _beside(sides: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return facts of several runs as rows, "-" where one has none."""
    names = dict.fromkeys([name for side in sides for name in side])
    return {name: [side.get(name, "-") for side in sides] for name in names}


def _results(run: ReportedRun) -> dict[str, str]:
    """Return the metrics of a run, and how fast it was."""
    results: dict[str, str] = {}
    for name in _shown(run):
        values = run.series[name][:, 1]
        # What stands under the name of a metric is the mean since the line before.
        newest = run.series[f"{name}_last"][:, 1] if f"{name}_last" in run.series else values
        results[f"last {name}"] = number(newest[-1])
        results[f"range of {name}"] = f"{number(values.min())} to {number(values.max())}"
    status = run.row.status
    if status is None:
        return results
    if status.steps_per_s is not None:
        results["steps/s"] = number(status.steps_per_s)
    if status.data_wait is not None:
        results["waits for data"] = f"{status.data_wait:.1%}"
    results["elapsed since the newest start"] = f"{status.elapsed_s:,.1f} s"
    results["memory"] = format_bytes(status.arena_bytes)
    return results


def _details(run: ReportedRun) -> str:
    parts = [f"<h2>{text(run.row.name)}</h2>"]
    parts += [f"<p>{text(problem)}</p>" for problem in run.problems]
    status, record = run.row.status, run.row.record
    if status is not None:
        parts += _of_status(status)
    parts.append(samples_part(run.samples))
    lines = "\n".join([text(line, MOST_OF_LINE) for line in run.plan])
    parts.append(
        "<details><summary>Plan and memory</summary>"
        f'<pre class="wide" tabindex="0">{lines}</pre></details>'
    )
    if record is not None and record.starts:
        rows = {
            time_text(start.started_at_s): [
                f"{start.first_step:,}",
                start.host,
                f"{start.git_commit[:12] or '-'}{' + changes' * bool(start.has_changes)}",
                " ".join(start.command[1:]),
            ]
            for start in record.starts
        }
        heads = ["started", "after step", "host", "commit", "command"]
        parts.append(_folded("Starts", heads, rows))
    rows = {
        f"{one.step:,}": [format_bytes(one.size_bytes), one.problem or ("NaN" * one.has_nan)]
        for one in run.checkpoints
    }
    heads = ["step", "size", "notes"]
    parts.append(_folded("Checkpoints", heads, rows))
    return "".join(parts)


def _of_status(status: Status) -> list[str]:
    """Return what a status says of actors, streams and ranks."""
    actors = {
        actor.name: [
            actor.stream,
            f"{actor.firings:,}",
            f"{actor.busy_share:.0%}",
            f"{actor.ms_per_firing:.3f}",
            actor.waited_for,
        ]
        for actor in status.actors
    }
    heads = ["actor", "stream", "firings", "busy", "ms/firing", "waited for last"]
    count = f"{status.ranks} rank{'s' * (status.ranks > 1)}"
    parts = [
        f"<p>{text(status.job)} on {text(status.host)}, {count}</p>",
        _folded("Actors", heads, actors),
    ]
    streams = {name: [f"{share:.0%}"] for name, share in status.streams.items()}
    parts.append(_folded("Streams", ["stream", "busy"], streams))
    if status.by_rank:
        behind = {status.rank_behind: "the others wait for it"}
        ranks = {
            str(rank): [one.host, f"{one.waiting_share:.0%}", behind.get(rank, "")]
            for rank, one in enumerate(status.by_rank)
        }
        parts.append(_folded("Ranks", ["rank", "host", "waiting for others", "notes"], ranks))
    return parts


def _table(heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table whose rows have names; None where it has no row."""
    lines = [
        f'<tr><th scope="row">{text(name)}</th>{cells(values)}</tr>'
        for name, values in rows.items()
    ]
    return table(heads, lines) if lines else "<p>None.</p>"


def _folded(title: str, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    return f"<details><summary>{title}</summary>{_table(heads, rows)}</details>"
