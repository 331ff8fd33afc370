"""Commands that print tables: `actorflow pack | ckpt | ops | passes`.

`pack` places the buffers of a CSV file, `ckpt` lists, verifies or exports the checkpoints of a
run, `ops` prints the table op x knowledge with its gaps, `passes` every rewrite of the compiler in
order.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from actorflow.checkpoint.errors import writing
from actorflow.checkpoint.fs import step_of
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.checkpoint.reader import CheckpointRow
from actorflow.checkpoint.shard import ShardSpec, TensorPiece, write_pieces
from actorflow.checkpoint.weights import model_boxes
from actorflow.compile.extensions import load_plugins
from actorflow.environment.option_values import parse_bytes
from actors.kernels.host import catalogue
from compiler.contract.errors import ActorflowError, CompileError, InternalError
from compiler.graph.program_builder import expand
from compiler.graph.registry import COLUMNS, Op, OpAttr, all_ops, infer_type, is_comm, is_source
from compiler.ops.language.definition import definition
from memory.offsets import OffsetPlan, plan_offsets
from memory.report import format_bytes
from memory.verify import OverlapError, check_no_overlap

# `actorflow pack`. A buffer is live in the steps [lower, upper) and needs `size` bytes. Columns of
# other names are refused, for a planner that ignores them (an alignment of one buffer, a gap in its
# life, a fixed offset) is silently wrong. The placement is checked by `memory.verify`, which shares
# nothing with the planner, before it is shown.

_COLUMNS = ("id", "lower", "upper", "size")
_LIMIT = 1 << 61
_WORK = 250_000
"""Work of the search: some ten seconds, of which most files need a fraction."""

_DOES_NOT_FIT = 3
"""Not 2, which stands for arguments that make no sense."""

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class _BufferColumns:
    ids: tuple[str, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size: tuple[int, ...]


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow pack` to its parser."""
    parser.epilog = (
        "Exit code 3 if the buffers do not fit the capacity, 1 if the file is not such a CSV file."
    )
    add = parser.add_argument
    add("file", help="a CSV file with the columns id,lower,upper,size")
    add("--capacity", type=_bytes, metavar="BYTES", help="size of the arena: 1048576, or 1MiB")
    add("--alignment", type=_bytes, default=1, metavar="N", help="alignment of offsets (default 1)")
    add("--json", action="store_true", help="print the placement as JSON")


def run_pack(options: argparse.Namespace) -> int:
    """Place the buffers, print the placement; 0 where it fits or no capacity is given, else 3.

    Raises:
        CompileError: The file or an option is not what it must be.
        OSError: The file cannot be read.
    """
    buffers = _read(options.file)
    begin = time.perf_counter()
    plan = _plan(buffers, options)
    seconds = time.perf_counter() - begin
    fits = options.capacity is None or plan.peak_bytes <= options.capacity
    if options.json:
        print(json.dumps(_report(buffers, plan, fits, seconds)))
    else:
        print("\n".join(_summary(buffers, plan, options.capacity, seconds)))
    return 0 if fits else _DOES_NOT_FIT


def _bytes(text: str) -> int:
    """Read a number of bytes for argparse."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plan(buffers: _BufferColumns, options: argparse.Namespace) -> OffsetPlan:
    columns = buffers.lower, buffers.upper, buffers.size
    try:
        plan = plan_offsets(
            *columns, alignment=options.alignment, capacity=options.capacity, max_work=_WORK
        )
    except ValueError as error:
        raise CompileError(f"{options.file}: {error}") from error
    try:
        check_no_overlap(plan.offsets, *columns, plan.peak_bytes, alignment=options.alignment)
    except OverlapError as error:
        raise InternalError(f"the placement of {options.file} is wrong: {error}") from error
    return plan


def _report(
    buffers: _BufferColumns, plan: OffsetPlan, fits: bool, seconds: float
) -> dict[str, object]:
    return {
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "fits": fits,
        "optimal": plan.is_optimal,
        "certificate": plan.certificate,
        "seconds": round(seconds, 6),
        "offsets": dict(zip(buffers.ids, plan.offsets, strict=True)),
    }


def _summary(
    buffers: _BufferColumns, plan: OffsetPlan, capacity: int | None, seconds: float
) -> list[str]:
    bound, peak = plan.lower_bound_bytes, plan.peak_bytes
    lines = [
        f"{len(buffers.ids)} buffers, at most {bound} bytes ({format_bytes(bound)}) live at once,"
        f" at step {plan.peak_step}",
        f"peak {peak} bytes ({format_bytes(peak)}): {plan.certificate}",
        f"found by {plan.algorithm} in {seconds:.2f} s, and checked",
    ]
    if capacity is not None and peak <= capacity:
        lines.append(f"fits into {capacity} bytes, {capacity - peak} to spare")
    elif capacity is not None:
        is_proved = plan.proved_bytes > capacity
        reason = "no placement does" if is_proved else "whether another placement does is open"
        lines.append(f"does not fit into {capacity} bytes, {peak - capacity} too many: {reason}")
    return lines


def _read(file: str) -> _BufferColumns:
    """Read a CSV file of buffers. Raises CompileError, naming the line, where it is none."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise CompileError(
            f"{file}: expected a CSV file in UTF-8, got the byte {error.object[error.start]:#04x}"
            f" at offset {error.start}: is it a text file?"
        ) from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any([v.strip() for v in row])]
    except csv.Error as error:
        raise CompileError(f"{file}, line {reader.line_num}: not CSV: {error}") from error
    if not rows:
        raise CompileError(f"{file} is empty: expected a header {','.join(_COLUMNS)}")
    places = _places(file, *rows[0])
    return _buffers(file, places, rows[1:])


def _places(file: str, line: int, header: list[str]) -> tuple[int, ...]:
    """Return where each of our columns is."""
    names = [name.strip() for name in header]
    if sorted(names) == sorted(_COLUMNS):
        return tuple([names.index(name) for name in _COLUMNS])
    missing = [name for name in _COLUMNS if name not in names]
    others = [name for name in names if name not in _COLUMNS]
    if missing:
        what = f"lacks {', '.join(missing)}"
    elif others:
        what = f"has {_quoted(','.join(others))}, which would not be heeded: remove the column"
    else:
        what = "names a column twice"
    raise CompileError(
        f"{file}, line {line}: expected the columns {','.join(_COLUMNS)} in any order; the header"
        f" {_quoted(','.join(names))} {what}"
    )


def _buffers(
    file: str, places: tuple[int, ...], rows: Iterable[tuple[int, list[str]]]
) -> _BufferColumns:
    line_of: dict[str, int] = {}
    columns: tuple[list[int], ...] = ([], [], [])
    total = 0
    for line, row in rows:
        where = f"{file}, line {line}"
        if len(row) != len(_COLUMNS):
            raise CompileError(f"{where}: expected {len(_COLUMNS)} values, got {len(row)}")
        name = row[places[0]].strip()
        if not name or not name.isprintable():
            raise CompileError(f"{where}: expected an id that can be printed, got {_quoted(name)}")
        if name in line_of:
            raise CompileError(
                f"{where}: expected ids to differ, got {_quoted(name)}, which line"
                f" {line_of[name]} has too"
            )
        line_of[name] = line
        lower, upper, size = (
            _integer(where, column, row[place])
            for column, place in zip(_COLUMNS[1:], places[1:], strict=True)
        )
        if upper < lower:
            raise CompileError(f"{where}: expected upper >= lower, got [{lower}, {upper})")
        if size < 0:
            raise CompileError(f"{where}: expected a size of 0 bytes or more, got {size}")
        total += size
        if total >= _LIMIT:
            raise CompileError(f"{where}: expected sizes that add up to less than 2^61 bytes")
        for column, value in zip(columns, (lower, upper, size), strict=True):
            column.append(value)
    return _BufferColumns(tuple(line_of), *map(tuple, columns))


def _integer(where: str, column: str, text: str) -> int:
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise CompileError(f"{where}: expected an integer as {column}, got {_quoted(text)}")
    if len(digits) > 18:
        raise CompileError(f"{where}: expected {column} of at most 18 digits, got {_quoted(text)}")
    return int(text)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


# `actorflow ckpt ls | verify | export`.

_WHERE = "directory of a run, or of one checkpoint in it (RUN/step-0000000500)"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that prints an answer for programs."""
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def add_ckpt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the checkpoints of a run")
    listing.add_argument("directory", help=_WHERE)
    add_json(listing)
    listing.set_defaults(command=_list)
    verify = actions.add_parser(
        "verify", help="check every byte against its hash, and that pieces make up the tensors"
    )
    verify.add_argument("directory", help=_WHERE)
    verify.add_argument("--step", type=int, help="verify only this step of the run")
    add_json(verify)
    verify.set_defaults(command=_verify)
    export = actions.add_parser("export", help="write whole tensors into one safetensors file")
    export.add_argument("directory", help=_WHERE)
    export.add_argument("file", help="the file to make; it must not exist")
    export.add_argument("--step", type=int, help="export this step of the run, not the newest")
    export.add_argument(
        "--model", action="store_true", help="without the optimizer, as model.load takes it"
    )
    export.set_defaults(command=_export)


def _chosen(directory: str) -> tuple[CheckpointManager, int | None]:
    """Return the run of a directory, and the step if it is that of one checkpoint."""
    if not Path(directory).is_dir():
        raise FileNotFoundError(2, "no such directory", directory)
    path = Path(os.path.abspath(directory))
    manager, step = CheckpointManager(path), step_of(path.name)
    if step is None or manager.steps():
        return manager, None
    return CheckpointManager(path.parent), step


def _list(options: argparse.Namespace) -> int:
    manager, step = _chosen(options.directory)
    rows = [row for row in manager.describe() if step in (None, row.step)]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], default=str))  # paths
        return 0 if rows else 1
    if not rows:
        print(f"no checkpoints in {options.directory}")
        return 1
    head = f"{'step':>10}  {'size':>10}  {'tensors':>7}  {'pieces':>7}  {'ranks':>5}"
    print(f"{head}  {'saved':<19}  notes")
    for row in rows:
        print(_listed(row))
    if hidden := manager.hidden():
        print(
            f"{len(hidden)} hidden, of checkpoints that were replaced or not finished: the next run"
            " in the directory removes them"
        )
    return 0


def _listed(row: CheckpointRow) -> str:
    """Return the line of one checkpoint; `saved` is local time."""
    if row.problem:
        counts = f"{'-':>10}  {'-':>7}  {'-':>7}  {'-':>5}"
        return f"{row.step:>10}  {counts}  {'-':<19}  {row.problem}"
    try:
        saved = datetime.fromtimestamp(row.modified_ns / 1e9).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # a file's time may be any number
        saved = "-"
    size, note = format_bytes(row.size_bytes), "NaN" if row.has_nan else ""
    counts = f"{size:>10}  {row.num_tensors:>7}  {row.num_pieces:>7}  {row.num_ranks:>5}"
    return f"{row.step:>10}  {counts}  {saved:<19}  {note}".rstrip()


def _verify(options: argparse.Namespace) -> int:
    manager, step = _chosen(options.directory)
    only_step = step if options.step is None else options.step
    steps = list(manager.steps()) if only_step is None else [only_step]
    if not steps and not options.json:
        print(f"no checkpoints in {options.directory}")
        return 1
    rows: list[dict[str, object]] = []
    for number in steps:
        try:
            manifest = manager.verify(number)
        except ActorflowError as error:
            rows.append({"step": number, "is_valid": False, "problem": str(error)})
            if not options.json:
                print(f"step {number}: DAMAGED: {error}")
            continue
        size = sum(f.size_bytes for f in manifest.files)
        counts = {"num_tensors": len(manifest.tensors), "size_bytes": size}
        rows.append({"step": number, "is_valid": True, **counts})
        text = f"step {number}: valid, {len(manifest.tensors)} tensors"
        if manifest.num_ranks > 1:
            text += f" in {len(manifest.pieces)} pieces of {manifest.num_ranks} ranks"
        if not options.json:
            print(f"{text}, {format_bytes(size)}")
    if options.json:
        print(json.dumps(rows))
    return 0 if rows and all([row["is_valid"] for row in rows]) else 1


def _export(options: argparse.Namespace) -> int:
    return export_weights(
        options.directory, options.file, options.step, is_model_alone=options.model
    )


def export_weights(
    directory: str, file: str, step: int | None, *, is_model_alone: bool = True
) -> int:
    """Write the whole tensors of a checkpoint into a safetensors file that is not there yet.

    `step` is None for the newest one of a run. Returns the exit code: 1 where there is none.
    """
    manager, own_step = _chosen(directory)
    step = own_step if step is None else step
    boxes = model_boxes if is_model_alone else None
    loaded = manager.latest(boxes=boxes) if step is None else manager.load(step, boxes=boxes)
    if loaded is None:
        print(f"no checkpoints in {directory}")
        return 1
    path = Path(os.path.abspath(file))
    pieces = [
        TensorPiece.of_whole(tensor)
        for tensor in loaded.manifest.tensors
        if tensor.name in loaded.tensors
    ]
    spec = ShardSpec(path.name, tuple(pieces), "pt")
    with writing(path.parent, f"write {path.name}", manager.fs.free_bytes, spec.size_bytes()):
        write_pieces(manager.fs, path.parent, (spec,), loaded.tensors)
    print(
        f"step {loaded.manifest.step}: {len(pieces)} tensors in {file},"
        f" {format_bytes(spec.size_bytes())}"
    )
    return 0


# `actorflow ops [FILE.py ...]`.

_DERIVING = "compiler.ops.language."
"""Facts about an op whose functions stand there follow from its program."""

_HOUSE = Path(__file__).resolve().parents[2]

LEGEND = (
    "yes: stated; derived: follows from the op's program; .: the default serves; -: not known."
    " Kernels: fused ones are generated, together with what stands around the op."
)


def add_ops_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow ops` to its parser."""
    parser.add_argument("files", nargs="*", help="Python files that define ops; they run first")
    parser.add_argument("--full", action="store_true", help="a column for each attribute")
    add_json(parser)


def run_ops(options: argparse.Namespace) -> int:
    """Print the table. Exceptions of the files that are run leave as they are."""
    import compiler.pipeline.standard_ops  # noqa: F401  # fills the columns that this prints

    load_plugins()
    for file in options.files:
        runpy.run_path(file, run_name="actorflow_ops")  # not "__main__": nothing is trained
    columns = [column for column in COLUMNS if column is not definition]
    rows = [
        {
            "op": op.name,
            **{column.name: _cell(column, op) for column in columns},
            "kernels": _kernels(op),
            "file": _file(op),
        }
        for op in all_ops()
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    if options.full:
        _print_table(rows)
        print("\n" + LEGEND)
        return 0
    _print_table(
        [
            {
                "op": row["op"],
                "gradient": row["gradient"],
                "kernels": row["kernels"],
                "not known": ", ".join([name for name, cell in row.items() if cell == "-"]) or ".",
                "file": row["file"],
            }
            for row in rows
        ]
    )
    print(f"\n{LEGEND} --full has a column for each attribute.")
    return 0


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows as a table of Markdown, padded to columns on a terminal."""
    titles = list(rows[0])
    widths = [max([len(title), *[len(row[title]) for row in rows]]) for title in titles]
    if not sys.stdout.isatty():
        widths = [0] * len(titles)
    for cells in (titles, *[list(row.values()) for row in rows]):
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
        print(f"| {' | '.join(padded)} |")
        if cells is titles:
            print(f"|{'|'.join(['-' * max(3, width + 2) for width in widths])}|")


def _cell(column: OpAttr[Any], op: Op) -> str:
    if column.has(op):
        return "derived" if _is_derived(column, op) else "yes"
    return "-" if column.default is None else "."


def _is_derived(column: OpAttr[Any], op: Op) -> bool:
    """Whether a fact follows from the op's program; a gradient that was stated does not."""
    is_defined = definition.has(op)
    if column.name == "gradient" and is_defined and definition.get(op).gradient is not None:
        return False
    if column.name == "is_exact":
        return is_defined
    return getattr(column.get(op), "__module__", "").startswith(_DERIVING)


def _kernels(op: Op) -> str:
    if expand.has(op):
        return "fused"
    if is_source.get(op) or is_comm.get(op):
        return "."
    kinds = dict.fromkeys(
        [kernel.name.partition(".")[0] for kernel in catalogue.kernels_for(op.name)]
    )
    return " ".join(kinds) or "-"


def _file(op: Op) -> str:
    """Return where the op is defined: within the repository if it is ours, else the whole path."""
    path = Path(infer_type.where(op)) if infer_type.has(op) else None
    if path is None:
        return "-"
    return str(path.relative_to(_HOUSE) if path.is_relative_to(_HOUSE / "compiler") else path)


def run_passes(options: argparse.Namespace) -> int:
    """Print the table of passes, those of plugins among them, and return the exit code."""
    from compiler.pipeline.pipeline import PASSES
    from compiler.pipeline.rewrites import registered, with_added

    load_plugins()
    files = {added.name: ", ".join(added.files) for added in registered()}
    rows = [
        {
            "pass": step.name,
            "needs": ", ".join(step.needs) or "-",
            "provides": ", ".join(step.provides) or "-",
            "from": files.get(step.name, "actorflow"),
        }
        for step in with_added(PASSES)
    ]
    if options.json:
        print(json.dumps(rows))
    else:
        _print_table(rows)
    return 0
