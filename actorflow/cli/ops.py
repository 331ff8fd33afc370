"""`actorflow ops [FILE.py ...]`: the table op x knowledge, its gaps, and where an op is defined."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

from actorflow.compile.plugins import load_plugins
from actors.kernels import catalogue
from compiler.fusion.define import definition
from compiler.fusion.expansion import expand
from compiler.registry import COLUMNS, Op, OpAttr, all_ops, infer_type, is_comm, is_source

_DERIVING = "compiler.fusion."
"""Facts about an op whose functions stand there follow from its program."""

_HOUSE = Path(__file__).resolve().parents[2]

LEGEND = (
    "yes: stated; derived: follows from the op's program; .: the default serves; -: not known."
    " Kernels: fused ones are generated, together with what stands around the op."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow ops` to its parser."""
    parser.add_argument("files", nargs="*", help="Python files that define ops: they are run first")


def run(options: argparse.Namespace) -> int:
    """Print the table. Exceptions of the files that are run leave as they are."""
    import compiler.ops.standard  # noqa: F401  # fills the columns that this prints

    load_plugins()
    for file in options.files:
        runpy.run_path(file, run_name="actorflow_ops")  # not "__main__": nothing is trained
    columns = [column for column in COLUMNS if column is not definition]
    print("| op | " + " | ".join([c.name for c in columns]) + " | kernels | file |")
    print("|---|" + "---|" * (len(columns) + 2))
    for op in all_ops():
        cells = [_cell(column, op) for column in columns]
        print(f"| {op.name} | {' | '.join(cells)} | {_kernels(op)} | {_file(op)} |")
    print("\n" + LEGEND)
    return 0


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
    kinds = dict.fromkeys([kernel.name.partition(".")[0] for kernel in catalogue.find(op.name)])
    return " ".join(kinds) or "-"


def _file(op: Op) -> str:
    """Return where the op is defined: within the house if it is ours, else the whole path."""
    path = Path(infer_type.where(op)) if infer_type.has(op) else None
    if path is None:
        return "-"
    return str(path.relative_to(_HOUSE) if path.is_relative_to(_HOUSE / "compiler") else path)
