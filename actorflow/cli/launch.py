"""`actorflow launch -n P SCRIPT.py [ARGS...]`: run a script as P ranks of one job."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from actorflow.settings import Settings
from compiler.errors import CompileError

_GRACE_S = 10.0
_MOST_GRACE_S = 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow launch` to its parser."""
    parser.add_argument(
        "-n", "--ranks", type=int, required=True, metavar="P", help="how many processes run it"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=_GRACE_S,
        metavar="SECONDS",
        help="how long the others may take to end after a rank failed (default %(default)g)",
    )
    parser.add_argument("file", help="a Python script; its own arguments follow it")


def run(options: argparse.Namespace) -> int:
    """Launch the ranks and return the job's exit status. Raises CompileError for bad options."""
    # Late: it loads zmq, of which no other command has a need.
    from actorflow.ranks.launcher import RankLaunch, launch
    from actors.collectives.native import MAX_RANKS

    if not 1 <= options.ranks <= MAX_RANKS:
        raise CompileError(f"-n: expected 1 to {MAX_RANKS} ranks, came {options.ranks}")
    if not 0 <= options.grace <= _MOST_GRACE_S:
        raise CompileError(
            f"--grace: expected 0 to {_MOST_GRACE_S:,.0f} seconds, came {options.grace}"
        )
    if not Path(options.file).is_file():
        raise FileNotFoundError(2, "no such script", options.file)
    settings = Settings.from_env(os.environ)
    command = (options.file, *options.rest)
    asked = RankLaunch(command, options.ranks, settings.rank_seconds, options.grace)
    return launch(asked, os.environ)
