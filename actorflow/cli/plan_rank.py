"""`actorflow plan --rank R SCRIPT.py`: whose plan it is, of the ranks of a job's mesh."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from actorflow.compile.agreed_plan import classes_of_ranks
from compiler.errors import CompileError
from compiler.mesh import ALONE, Ranks

if TYPE_CHECKING:
    from actorflow.compile.compiling import Compilation

_MOST_ONE_BY_ONE = 8
"""Ranks that are told apart each by its own graph; with an evaluation there is no shorter way."""
_OF_LAUNCH = re.compile(r"-n\d*|--ranks(=.*)?")


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    text = "of the job's mesh, whose plan it is (default 0); no process of another is needed"
    parser.add_argument("--rank", type=int, metavar="R", help=text)


def asked_rank(options: argparse.Namespace, *, is_plan_file: bool) -> Ranks:
    """Return what says whose plan is asked for. Raises CompileError for that of a file."""
    if options.rank is not None and is_plan_file:
        raise CompileError(
            f"--rank {options.rank} is for scripts, and {options.file} is a plan of one rank"
            " already; save that of another from its script"
        )
    return replace(ALONE, rank=options.rank or 0)


def check_no_launch(own: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """End with a usage error where the number of ranks stands before a script, as for `launch`."""
    for word in own[1:]:
        if word.endswith(".py"):
            return
        if _OF_LAUNCH.fullmatch(word):
            parser.error(
                f"{own[0]} needs no {word}: how many ranks there are the job's mesh says. plan"
                " shows that of one rank, by --rank R (default 0), and simulate runs those of all"
            )


def whose_plan(asked: Compilation) -> str:
    """Return a line that says which rank's plan it is; "" for a job of one rank."""
    ranks = asked.hardware.ranks
    if ranks.count == 1:
        return ""
    line = f"rank {ranks.rank} of {ranks.count}"
    if asked.evaluation is not None and ranks.count > _MOST_ONE_BY_ONE:
        return line
    told = classes_of_ranks(asked)
    own, count = told.count(told[ranks.rank]), len({*told})
    if count == 1:
        return f"{line}, all of which have this plan"
    alike = f"{own} ranks have" if own > 1 else "it alone has"
    return f"{line}: {alike} this plan, one of {count} classes of ranks"
