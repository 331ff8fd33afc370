"""`actorflow launch -n P SCRIPT.py [ARGS...]`; and a user's script run in this process.

An error that actorflow raises on purpose says what is wrong, where, and how to mend it. So its
message is all that is shown, with the line of the script that led to it, and after the traceback
of what the user's own code raised where that is the cause. Every other exception is the script's
own: it is handed to `sys.excepthook` as under `python`, without frames of ours, but for a bug of
ours. With ACTORFLOW_TRACEBACK=full every error is, with all frames that the script led to.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from actorflow.cli import check
from actorflow.environment.settings import MOST_SECONDS, Settings
from actorflow.run.run_record import COMMAND, command_of_process
from actorflow.run.shown_errors import is_on_purpose, shows_all_frames, without_ours
from actorflow.tensor.tracer import is_users, shown_path
from compiler.contract.errors import ActorflowError, CompileError
from compiler.contract.files import user_path

if TYPE_CHECKING:
    from actorflow.distributed.agent_messages import HostLimits
    from actorflow.distributed.launcher import RankLaunch

_GRACE_S = 10.0
_MOST_GRACE_S = 86_400.0
_HOST_TIMEOUT_S = 15.0
_HOST_GRACE_S = 30.0
_LEAST_TIMEOUT_S = 3.0
"""Several signs of life, which come every half second."""
_MOST_HOSTS = 1024
_MOST_RESTARTS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `actorflow launch` to its parser."""
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        required=True,
        metavar="P",
        help="number of ranks; with --hosts MIN:MAX that on MAX hosts, as many on each",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=_GRACE_S,
        metavar="SECONDS",
        help="time for the other ranks to exit after a rank failed (default %(default)g)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all ranks again when one has failed, at most N times in a window (default 0)",
    )
    parser.add_argument(
        "--restart-window",
        type=float,
        metavar="SECONDS",
        help="the window of --restarts (default 600)",
    )
    parser.add_argument(
        "--log-dir", metavar="DIR", help="write what ranks above 0 print to DIR/rank-R.log"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run nothing: try whether the hosts fit together, in seconds, and say what is wrong",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="with --check: the directory of checkpoints",
    )
    _add_hosts(parser)
    parser.add_argument("file", help="a Python script; its arguments follow it")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group(
        "several hosts", "the same command, started once on each host; see docs/ranks.md"
    )
    _add_host_arguments(hosts)


def _add_host_arguments(hosts: argparse._ArgumentGroup) -> None:
    hosts.add_argument(
        "--hosts",
        default="1",
        metavar="H",
        help="number of hosts (default 1), or MIN:MAX: so many as there are, at every start",
    )
    hosts.add_argument(
        "--host-grace",
        type=float,
        metavar="SECONDS",
        help="time for further hosts to come once MIN are there (default 30)",
    )
    hosts.add_argument(
        "--host-index",
        type=int,
        metavar="I",
        help="number of this host, from 0 (default: what ACTORFLOW_HOST_INDEX or a scheduler says)",
    )
    hosts.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of host 0 (default: MASTER_ADDR and MASTER_PORT; port 29400)",
    )
    hosts.add_argument(
        "--key-file",
        metavar="FILE",
        help="secret of the job, the same on all hosts (default: ACTORFLOW_KEY_FILE)",
    )
    hosts.add_argument(
        "--host-timeout",
        type=float,
        default=_HOST_TIMEOUT_S,
        metavar="SECONDS",
        help="time after which a silent host is lost (default %(default)g)",
    )
    hosts.add_argument(
        "--mixed-hosts",
        action="store_true",
        help="take hosts with other processors, compilers or libraries: bits may differ",
    )
    hosts.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="started once: take hosts of Ray at HOST:PORT, 'auto', or 'local' for this machine",
    )
    hosts.add_argument(
        "--make-key", action=_MakeKey, metavar="FILE", help="write a new secret to FILE, and exit"
    )


class _MakeKey(argparse.Action):
    """Write a key file as soon as the option is read, as --version prints at once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from actorflow.distributed.rendezvous import write_key_file

        path = user_path(str(values))
        try:
            write_key_file(Path(path))
        except OSError as error:
            parser.error(f"--make-key: {path}: {error.strerror}")
        print(f"wrote a secret for 'actorflow launch --key-file {path}'; copy it to all hosts")
        parser.exit(0)


def run(options: argparse.Namespace) -> int:
    """Launch the ranks and return the job's exit status. Raises CompileError for bad options."""
    # Late: it loads zmq, of which no other command has a need.
    from actorflow.distributed.agent_messages import HostLimits
    from actorflow.distributed.launcher import RankLaunch, launch
    from actorflow.distributed.restart import WINDOW_S
    from actors.collectives.segments import MAX_RANKS

    least_hosts, num_hosts = _num_hosts(options)
    most = MAX_RANKS * max(1, num_hosts)
    if not 1 <= options.ranks <= most:
        raise CompileError(f"-n: expected 1 to {most} ranks, came {options.ranks}")
    if not 0 <= options.grace <= _MOST_GRACE_S:
        raise CompileError(
            f"--grace: expected 0 to {_MOST_GRACE_S:,.0f} seconds, came {options.grace}"
        )
    _check_hosts(options, least_hosts, num_hosts)
    _check_restarts(options.restarts, options.restart_window)
    if not Path(options.file).is_file():
        raise FileNotFoundError(2, "no such script", options.file)
    if options.run_dir is not None and not options.check:
        raise CompileError(
            f"--run-dir {options.run_dir} is for --check; a script names its run directory itself,"
            " in fit(checkpoint=...)"
        )
    environ = {**os.environ, COMMAND: json.dumps(command_of_process())}
    if options.log_dir is not None:
        environ["ACTORFLOW_LOG_DIR"] = options.log_dir
    settings = Settings.from_env(environ)
    _open_standard_files()
    asked = RankLaunch(
        (options.file, *options.rest),
        options.ranks,
        settings.rank_seconds,
        options.grace,
        options.restarts,
        WINDOW_S if options.restart_window is None else options.restart_window,
        options.mixed_hosts,
    )
    grace_s = _HOST_GRACE_S if options.host_grace is None else options.host_grace
    if options.check:
        command = (str(Path(check.__file__)), options.file, options.run_dir or "")
        # A rank per host: what is tried belongs to hosts, and all ranks of one would say the same.
        is_set = "ACTORFLOW_RANK_SECONDS" in environ
        wait_s = settings.rank_seconds if is_set else check.MOST_S
        # Mixed: what differs is to stand in the table, of all hosts.
        asked = RankLaunch(command, num_hosts, wait_s, 0.0, are_hosts_mixed=True, needs_link=False)
        grace_s = min(grace_s, check.MOST_S)
    limits = HostLimits(asked.wait_s, options.host_timeout, least_hosts, grace_s)
    if options.ray is not None:
        from actorflow.distributed.ray_hosts import launch_by_ray

        return launch_by_ray(asked, environ, options.ray, num_hosts, limits)
    if num_hosts == 1:
        return launch(asked, environ)
    return _launch_on_hosts(options, settings, asked, environ, num_hosts, limits)


def _num_hosts(options: argparse.Namespace) -> tuple[int, int]:
    """Return the least and the most of --hosts, which are one number but for MIN:MAX."""
    text = options.hosts
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least, least]
    if not all([number.isascii() and number.isdigit() for number in numbers]):
        raise CompileError(
            f"--hosts: expected a number of hosts, or MIN:MAX such as 2:4, came {text!r}"
        )
    least_hosts, num_hosts = [int(number) for number in numbers]
    if least_hosts > num_hosts:
        raise CompileError(
            f"--hosts {text}: expected MIN:MAX with MIN at most MAX; write --hosts {most}:{least}"
        )
    return least_hosts, num_hosts


def _check_hosts(options: argparse.Namespace, least_hosts: int, num_hosts: int) -> None:
    largest = min(_MOST_HOSTS, options.ranks)
    if not 1 <= least_hosts <= num_hosts <= largest:
        raise CompileError(
            f"--hosts: expected 1 to {largest} hosts for -n {options.ranks}, came {options.hosts}"
        )
    if least_hosts < num_hosts and options.ranks % num_hosts:
        raise CompileError(
            f"-n {options.ranks}: expected a multiple of {num_hosts} for --hosts {options.hosts},"
            f" since all hosts have as many ranks; -n {num_hosts} is one on each"
        )
    if options.host_grace is not None and ":" not in options.hosts:
        raise CompileError(
            "--host-grace is for --hosts MIN:MAX; a fixed number of hosts is waited for as long as"
            " ACTORFLOW_RANK_SECONDS says"
        )
    if options.host_grace is not None and not 0 <= options.host_grace <= _MOST_GRACE_S:
        raise CompileError(
            f"--host-grace: expected 0 to {_MOST_GRACE_S:,.0f} seconds, came {options.host_grace}"
        )
    if not _LEAST_TIMEOUT_S <= options.host_timeout <= _MOST_GRACE_S:
        raise CompileError(
            f"--host-timeout: expected {_LEAST_TIMEOUT_S:g} to {_MOST_GRACE_S:,.0f} seconds, came"
            f" {options.host_timeout}"
        )
    given = [name for name in ("host_index", "coordinator", "key_file") if _is_given(options, name)]
    if given and options.ray is not None:
        name = given[0].replace("_", "-")
        raise CompileError(f"--{name} is for hosts without Ray: --ray finds them itself")
    if num_hosts == 1 and given:
        name = given[0].replace("_", "-")
        raise CompileError(f"--{name} is for several hosts: give their number by --hosts, too")


def _is_given(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) is not None


def _launch_on_hosts(
    options: argparse.Namespace,
    settings: Settings,
    asked: RankLaunch,
    environ: Mapping[str, str],
    num_hosts: int,
    limits: HostLimits,
) -> int:
    from actorflow.distributed.rendezvous import (
        HostOfJob,
        host_index,
        launch_on_hosts,
        launcher_address,
        read_key_file,
    )

    key_file = settings.key_file if options.key_file is None else Path(options.key_file)
    here = HostOfJob(
        index=host_index(options.host_index, num_hosts, environ, limits.least_hosts),
        num_hosts=num_hosts,
        launcher=launcher_address(options.coordinator, environ),
        secret=read_key_file(key_file),
        limits=limits,
    )
    return launch_on_hosts(asked, environ, here)


def _check_restarts(restarts: int, window_s: float | None) -> None:
    if not 0 <= restarts <= _MOST_RESTARTS:
        raise CompileError(f"--restarts: expected 0 to {_MOST_RESTARTS:,}, came {restarts}")
    if window_s is not None and not restarts:
        raise CompileError(
            "--restart-window: expected --restarts N beside it, the number of restarts in the"
            " window"
        )
    if window_s is not None and not 0 < window_s <= MOST_SECONDS:
        raise CompileError(
            f"--restart-window: expected a number of seconds above 0, came {window_s}"
        )


def _open_standard_files() -> None:
    """Open /dev/null for standard files that are closed, as a daemon leaves them.

    Else pipes and sockets would take their numbers, and ranks would write into those.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


# A user's script, and what is shown of an error that ends it.

_RUN_PATH = runpy.run_path.__code__


def run_script(file: str, rest: list[str]) -> None:
    """Run a script as `python file *rest` does. Raises FileNotFoundError, and what it raises."""
    if not Path(file).is_file():
        raise FileNotFoundError(2, "no such script", file)
    sys.argv = [file, *rest]
    sys.path.insert(0, str(Path(file).resolve().parent))
    runpy.run_path(file, run_name="__main__")


def is_of_script(error: BaseException) -> bool:
    """Whether an error came out of a file that was run here, and not out of a command of ours."""
    frames = traceback.walk_tb(error.__traceback__)
    return any([frame.f_code is _RUN_PATH for frame, _ in frames])


def tell_error(error: Exception) -> None:
    """Print an error of a script to stderr, as the docstring of this module says."""
    trace = _within_script(error.__traceback__)
    if shows_all_frames():
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    elif not is_on_purpose(error):
        trace = without_ours(error, trace)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    else:
        for cause in _causes(error):
            exception = cause.with_traceback(without_ours(cause, cause.__traceback__))
            traceback.print_exception(exception, chain=False)
        print(f"actorflow: {error}{_leading_line(error, trace)}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)


def _within_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the script."""
    while trace is not None and trace.tb_frame.f_code is not _RUN_PATH:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename == _RUN_PATH.co_filename:
        trace = trace.tb_next
    return trace


def _causes(error: BaseException) -> list[BaseException]:
    """Return what led to an error and came out of code of the user, the first of all first."""
    chain = [error]  # may be a ring: an error that is raised anew from what it was the cause of
    while (cause := _cause(chain[-1])) is not None and cause not in chain:
        chain.append(cause)
    foreign = [e for e in chain if not isinstance(e, ActorflowError)]
    return [e for e in reversed(foreign) if _lines_of_user(e.__traceback__)]


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _leading_line(error: BaseException, trace: TracebackType | None) -> str:
    """Return the innermost line of the user that led to an error, where its message has none."""
    lines = _lines_of_user(trace)
    if not lines or any([f"{Path(file).name}:" in str(error) for file, _ in lines]):
        return ""
    file, line = lines[-1]
    return f" ({shown_path(file)}:{line})"


def _lines_of_user(trace: TracebackType | None) -> list[tuple[str, int]]:
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    return [(file, line) for file, line in frames if is_users(file)]
