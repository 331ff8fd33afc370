"""`actorflow replay RUN --step N`: what a past step of a run read and made.

    actorflow replay runs/a --step 1200                    batch, losses of its rows, first NaN
    actorflow replay runs/a --step 1200 --print "*.attn"   ranges of all ops that the pattern names
    actorflow replay runs/a --step 1200 --at "log in head" that op, with what it reads, in whole
    actorflow replay runs/a --step 1200 --against 1100     what differs between two steps

The command that the run was started by is started again, and its `fit` replays in place of training
(`actorflow.run.replay`). What the script prints goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath
from typing import Any, cast

from actorflow.cli.inspect import add_json
from actorflow.cli.launched import die_with
from actorflow.environment.settings import ENVIRONMENT, REPLAY
from actorflow.run.broken_steps import ended_at
from actorflow.run.progress import number_text
from actorflow.run.replay_request import MOST_STEPS, ReplayError, ReplayRequest
from actorflow.run.report import METRICS_FILE, read_metrics
from actorflow.run.run_record import RunStart, read_record
from actorflow.run.status import StatusError, read_status
from actorflow.run.stopping import StopSignals
from actorflow.tensor.probes import range_text
from compiler.contract.codec import MOST_SHOWN, DecodeError, from_json, printable
from compiler.contract.files import read_regular, user_path

_MOST_BYTES = 1 << 30
_MOST_SHOWN = 20
_BLOCKS = " ▁▂▃▄▅▆▇█"
_FEW_ROWS = 5

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow replay`."""
    parser.add_argument("directory", metavar="RUN", help="folder of the run (fit's checkpoint=)")
    text = "the step, from 1 (default: the one whose loss ended the run)"
    parser.add_argument("--step", type=int, metavar="N", help=text)
    parser.add_argument("--against", type=int, metavar="M", help="show what differs from this step")
    text = "show an op and what it reads in whole: norm, histogram, first elements"
    parser.add_argument("--at", metavar="OP", action="append", default=[], help=text)
    text = (
        'show the ranges of the ops that a pattern names: by op, module, both ("log in head*") or'
        ' line ("train.py:41")'
    )
    parser.add_argument("--print", metavar="PATTERN", action="append", default=[], help=text)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Replay steps of a run and print what is known of them. Raises ActorflowError."""
    folder = user_path(options.directory)
    start = read_record(folder).newest
    step = _step(folder, options.step, "--step")
    steps = [step]
    if options.against is not None:
        steps.append(_step(folder, options.against, "--against"))
    result = _replayed(folder, start, steps, [_as_pattern(text) for text in options.at])
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    _mark_ranks(result["steps"])
    first, *others = result["steps"]
    lines = [
        *_head(result, first),
        *_batch_lines(first),
        *_values(first, options.at, options.print),
    ]
    for other in others:
        lines += _difference(first, other)
    for line in lines:
        # What a file says is shown as text alone, and in whole.
        pieces = [line[at : at + MOST_SHOWN] for at in range(0, len(line), MOST_SHOWN)]
        print("".join([printable(piece) for piece in pieces]))
    return 0


def _step(folder: str, asked: int | None, option: str) -> int:
    """Return a step of a run that was made. Raises ReplayError."""
    ended = ended_at(Path(folder))
    step = ended if asked is None else asked
    if step is None:
        raise ReplayError(f"no loss of {folder} ended the run: give --step N")
    last = min(max([ended or 0, *_known_steps(folder)]), MOST_STEPS)
    if not 1 <= step <= last:
        known = f"has made {last:,} steps, give one of 1 to {last}" if last > 0 else "made no step"
        raise ReplayError(f"{option} {step}: {folder} {known}")
    return step


def _known_steps(folder: str) -> Iterator[int]:
    from actorflow.checkpoint.manager import CheckpointManager

    yield from CheckpointManager(folder).steps()
    with suppress(StatusError):
        yield read_status(folder).step
    try:
        lines = read_metrics(Path(folder) / METRICS_FILE)
    except OSError:
        return
    yield from [line["step"] for line in lines if type(line.get("step")) is int]


def _as_pattern(text: str) -> str:
    """Return a pattern of an op as a person names it: "log in head" is "log in 'head'"."""
    op, _, module = text.partition(" in ")
    return f"{op} in '{module}'" if module and not module.startswith("'") else text


def _replayed(
    folder: str, start: RunStart, steps: Sequence[int], shown: Sequence[str]
) -> dict[str, Any]:
    """Start the command of a run again; return the result of its replay."""
    if not start.command:
        raise ReplayError(
            f"run {folder} was started by lines that a person typed, as in a notebook: there is no"
            " command to repeat; put them into a script"
        )
    text = printable(shlex.join(start.command))
    print(f"actorflow: in {printable(start.folder)}: {text}", file=sys.stderr, flush=True)
    names = {variable.name for variable in ENVIRONMENT}
    environment = {name: v for name, v in start.environment.items() if name in names}
    with tempfile.TemporaryDirectory() as made:
        result = Path(made) / "result.json"
        run = os.path.realpath(folder)
        named = start.directory or run
        request = ReplayRequest(run, named, tuple(steps), tuple(shown), str(result))
        environment = {**os.environ, **environment, REPLAY: request.text()}
        try:
            # Its prints must not be taken for ours.
            code = _run(start, environment)
        except (OSError, ValueError) as error:
            raise ReplayError(
                f"run {folder} cannot be replayed here: {error}; it was started on {start.host} in"
                f" {printable(start.folder)}"
            ) from None
        try:
            return cast("dict[str, Any]", from_json(read_regular(result, _MOST_BYTES)))
        except FileNotFoundError:
            raise ReplayError(
                f"nothing was replayed: the script ended with exit code {code}; what it printed"
                " says why"
                if code
                else f"nothing was replayed: the script ended without a fit with"
                f" checkpoint={named!r}"
            ) from None
        except DecodeError as error:
            raise ReplayError(f"the result of the replay cannot be read: {error}") from None


def _run(start: RunStart, environment: Mapping[str, str]) -> int:
    """Run a command to its end; return its exit code.

    A signal to end goes on to it, and it is killed where this process is.
    """
    tie = partial(die_with, os.getpid()) if sys.platform == "linux" else None
    with (
        subprocess.Popen(
            start.command,
            cwd=start.folder,
            env=environment,
            stdout=sys.stderr,
            preexec_fn=tie,  # noqa: PLW1509  # no other thread of this process runs Python
        ) as script,
        StopSignals(script.send_signal) as signals,
    ):
        code = script.wait()
    if signals.received:
        raise SystemExit(128 + signals.received[0])
    return code


# What is printed.


def _mark_ranks(steps: Sequence[dict[str, Any]]) -> None:
    """Give each value the mark of its rank, which is none where there is one rank."""
    for step in steps:
        has_several = len({row["rank"] for row in step["values"]}) > 1
        for row in step["values"]:
            row["mark"] = f"[rank {row['rank']}] " if has_several else ""


def _head(result: Mapping[str, Any], step: Row) -> list[str]:
    outputs = "  ".join([f"{name} {_number(value)}" for name, value in step["outputs"].items()])
    origin = f", replayed from the checkpoint of step {step['first_step']:,}"
    origin *= bool(step["first_step"])
    lines = [f"step {step['step']:,} of job {result['job']}{origin}", f"  {outputs}"]
    lines += [f"  {note}" for note in step["notes"]]
    compared = step["compared"]
    if not compared["num_values"]:
        lines.append(f"  {METRICS_FILE} has no line of these steps: nothing to compare with")
    elif not compared["num_different"]:
        lines.append(f"  same bits as {METRICS_FILE}: {_counted(compared)}")
    else:
        lines.append(
            f"  NOT the run's own: other than {METRICS_FILE} in {compared['num_different']} of"
            f" {_counted(compared)}"
        )
        lines += [
            # In all digits: often the last ones alone differ.
            f"    step {one['step']:,}: {one['name']} is {one['is']}, was {one['was']}"
            for one in compared["different"]
        ]
        reasons = step["reasons"] or ["plan, data, versions and processor are those of the run"]
        lines += [f"    {reason}" for reason in reasons]
    apart = [n for n, v in step["shown_outputs"].items() if v != step["outputs"].get(n)]
    if apart:
        lines.append(
            f"  the values below are of a plan that stores each: {', '.join(apart)} differs in the"
            " last bits"
        )
    return lines


def _counted(compared: Row) -> str:
    steps, count = compared["steps"], compared["num_values"]
    where = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    return f"{count:,} value{'s' * (count != 1)} of {where}"


def _batch_lines(step: Row) -> Iterator[str]:
    for number, batch in enumerate(step["batches"], 1):
        count = len(step["batches"])
        yield f"batch {number} of {count}" if count > 1 else "batch"
        for array in batch["arrays"]:
            broken = array["num_not_finite"]
            more = f", {broken:,} not finite" if broken else ""
            least, most = _number(array["least"]), _number(array["most"])
            yield f"  {array['name']}  {array['type']}  {least} to {most}{more}"
        origins, losses = batch["origins"], batch["row_losses"]
        if losses:
            yield "  loss of each row alone, without training, the largest first"
            order = sorted(range(len(losses)), key=lambda row: _rank_of(float(losses[row])))
            for row in order[:_FEW_ROWS]:
                where = f"  {origins[row]}" if row < len(origins) else ""
                yield f"    row {row}  {_number(losses[row])}{where}"
        else:
            yield f"  no losses of single rows: {batch['why_no_row_losses']}"
            for row, origin in enumerate(origins[:_FEW_ROWS]):
                yield f"    row {row}  {origin}"
            if len(origins) > _FEW_ROWS:
                yield f"    ... {len(origins)} rows in all (--json has each)"


def _rank_of(loss: float) -> float:
    return -math.inf if math.isnan(loss) else -loss


def _values(step: Row, at: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    rows: list[Row] = step["values"]
    yield from _first_broken(rows)
    for pattern in patterns:
        named = [row for row in rows if _is_named(row, _as_pattern(pattern))]
        yield f"{len(named)} values of {pattern!r}"
        for row in named:
            yield f"  {_text(row)}"
    by_number = {(row["rank"], row["when"], row["number"]): row for row in rows}
    for pattern in at:
        named = [row for row in rows if _is_named(row, _as_pattern(pattern)) and row["phase"]]
        if not named:
            raise ReplayError(
                f"--at {pattern!r}: no op of the step has this name; --print '*' shows all"
            )
        for row in named[:_MOST_SHOWN]:
            yield from _whole(row, "")
            for number in dict.fromkeys(row["inputs"]):
                read = by_number.get((row["rank"], row["when"], number))
                yield from _whole(read, "reads ") if read is not None else ()
        if len(named) > _MOST_SHOWN:
            yield f"... {len(named)} ops have this name (--json has all)"


def _first_broken(rows: Sequence[Row]) -> Iterator[str]:
    """Say of each rank which value is the first that is not finite, and what it was made of."""
    for rank in sorted({row["rank"] for row in rows}):
        own = [row for row in rows if row["rank"] == rank]
        prefix = own[0]["mark"]
        first = _first([row for row in own if row["num_nan"] or row["num_inf"]])
        if first is None:
            yield f"{prefix}all {len(own):,} values are finite"
            continue
        yield f"{prefix}the first value that is not finite"
        yield from _with_inputs(first, own)
        if first["num_nan"]:
            continue
        nan = _first([row for row in own if row["num_nan"]])
        if nan is None:
            yield f"  {prefix}no value has a NaN: infinities may be meant, as in a mask"
        else:
            yield f"{prefix}the first value with a NaN"
            yield from _with_inputs(nan, own)


def _first(rows: Sequence[Row]) -> Row | None:
    """Return the value that was the first to become what all of these are."""
    own = [row for row in rows if row["when"] == rows[0]["when"]]  # batches are one after the other
    return min(own, key=lambda row: tuple(row["order"]), default=None)


def _with_inputs(row: Row, rows: Sequence[Row]) -> Iterator[str]:
    yield f"  {_text(row)}"
    for number in dict.fromkeys(row["inputs"]):
        for read in rows:
            if read["number"] == number and read["when"] == row["when"]:
                yield f"    reads {_text(read)}"


def _text(row: Row) -> str:
    """Return a value in a line: which it is, where it comes from, what is in it."""
    known = range_text(float(row["least"]), float(row["most"]), row["num_nan"], row["num_inf"])
    phase = f", {row['phase']} pass" if row["phase"] else ""
    at = f", iteration {', '.join(map(str, row['iteration']))}" if row["iteration"] else ""
    when = f", {row['when']}" if row["when"] else ""
    where = f"{row['line']}{phase}{when}{at}"
    return (
        f"{row['mark']}{row['what']} ({where}): {row['type']} {known}, norm {_number(row['norm'])}"
    )


def _whole(row: Row, prefix: str) -> Iterator[str]:
    yield f"{prefix}{_text(row)}"
    detail = row["detail"]
    if not detail:
        return
    most = max(detail["histogram"], default=0)
    if most:
        top = len(_BLOCKS) - 1
        bars = "".join([_BLOCKS[math.ceil(top * count / most)] for count in detail["histogram"]])
        yield f"    {_number(detail['from'])} {bars} {_number(detail['to'])}"
    if detail["first_not_finite"] is not None:
        yield f"    not finite first at {detail['first_not_finite']} of {detail['shape']}"
    head = " ".join([_number(number) for number in detail["head"]])
    yield f"    {detail['num_zero']:,} zeros; begins {head}"


def _is_named(row: Row, pattern: str) -> bool:
    what = row["what"].removeprefix("result ").split(" of ", 1)[-1]
    op, _, module = what.partition(" in ")
    line = PurePath(row["line"]).name
    names = (what, op, module.strip("'"), line)
    return any([fnmatchcase(name, pattern) for name in names if name])


def _difference(first: Row, other: Row) -> Iterator[str]:
    """Say what differs between two steps: outputs, and the values whose size differs most."""
    yield f"step {first['step']:,} against step {other['step']:,}"
    for name, value in first["outputs"].items():
        if name in other["outputs"]:
            yield f"  {name}  {_number(value)} against {_number(other['outputs'][name])}"
    theirs = {_key(row): row for row in other["values"]}
    pairs = [(row, theirs[_key(row)]) for row in first["values"] if _key(row) in theirs]
    pairs.sort(key=lambda pair: -_apart(*pair))
    yield f"  of {len(pairs):,} values those whose norm differs most"
    for row, was in pairs[:_MOST_SHOWN]:
        if _apart(row, was) > 0.0:
            yield f"    {_text(row)}, was {_number(was['norm'])}"


def _key(row: Row) -> tuple[Any, ...]:
    return row["number"], row["what"], row["phase"], row["when"], row["rank"]


def _apart(row: Row, was: Row) -> float:
    """Return how far two norms are apart, as the logarithm of their ratio."""
    if bool(row["num_nan"] or row["num_inf"]) != bool(was["num_nan"] or was["num_inf"]):
        return math.inf
    sizes = [float(one["norm"]) for one in (row, was)]
    if sizes[0] == sizes[1] or not all(map(math.isfinite, sizes)):
        return 0.0
    return math.inf if not min(sizes) else abs(math.log(sizes[0] / sizes[1]))


def _number(value: object) -> str:
    return number_text(float(str(value)))  # NaN is a text in JSON
