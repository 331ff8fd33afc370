"""`actorflow plan --memory`: the memory map of a plan into a .html or .png file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from actorflow.memory_map.html import render_html
from actorflow.memory_map.png import check_pillow, write_png
from compiler.errors import CompileError
from compiler.plan import Plan
from memory.report import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the memory map to those of `plan`."""
    parser.add_argument(
        "--memory", metavar="FILE", help="draw who holds which bytes when: FILE.html or FILE.png"
    )
    parser.add_argument(
        "--without",
        metavar="PLAN",
        help="a plan file of the same job without a memory budget, to be drawn beside (.html)",
    )


def drawing(
    options: argparse.Namespace, load: Callable[[str], Plan]
) -> Callable[[Plan, Plan | None], str] | None:
    """Return what draws a plan and says so, or None where no map is asked for.

    It takes the plan and, to be drawn beside where `--without` names no other, the same one without
    recomputation if there is one.
    Checked here, before anything is compiled: the suffix, the folder, Pillow, the plan beside.

    Raises:
        CompileError: the file is neither .html nor .png, or `--without` does not fit.
        OSError: its folder is not there, or the plan beside cannot be read.
        MissingPillow: a .png is asked for, and Pillow is not installed.
    """
    if options.memory is None:
        if options.without is not None:
            raise CompileError("--without draws a second plan beside: it needs --memory FILE.html")
        return None
    path = Path(options.memory)
    if path.suffix not in (".html", ".png"):
        raise CompileError(
            f"--memory {path}: expected a file that ends in .html or .png, came"
            f" {path.suffix or 'no suffix'}"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(2, "no such directory", str(path.parent))
    if path.suffix == ".png":
        if options.without is not None:
            raise CompileError("--without draws two maps side by side, on a page: use .html")
        check_pillow()
    beside = None if options.without is None else load(options.without)

    def draw(plan: Plan, store_all: Plan | None) -> str:
        if path.suffix == ".png":
            write_png(plan, path)
        else:
            path.write_text(render_html(plan, beside or store_all), encoding="utf-8")
        return f"memory map in {path} ({format_bytes(path.stat().st_size)})"

    return draw
