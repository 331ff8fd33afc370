"""What is shown of an error that ends a script or a cell: the user's own frames, and the message.

A mistake of the user's is named by its message, which has the line. The frames of this package that
led from that line to the message say nothing more, so they are left out of what is printed; the
exception itself keeps them, for debuggers and loggers. All frames are shown of a bug of ours, and
of every error with ACTORFLOW_TRACEBACK=full. `import actorflow` puts this in place of Python's own
`sys.excepthook`; a hook of the user's stays, and gets the exception as it is.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

from actorflow.environment.settings import Settings, SettingsError
from actorflow.tensor.tracer import is_ours, is_users
from compiler.contract.errors import ActorflowError, InternalError


def show_user_frames() -> None:
    """Let errors that end a script, or a cell of a notebook, be shown without our frames."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    # By this name IPython asks an exception for its text; the class cannot know of this room.
    ActorflowError._render_traceback_ = _lines_of  # type: ignore[attr-defined]


def without_ours(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our frames; all of it where the error is a bug of ours."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    shown = _shown(error, [(f.tb_frame.f_code.co_filename, f.tb_lineno) for f in frames])
    rest: TracebackType | None = None
    for frame, is_shown in zip(reversed(frames), reversed(shown), strict=True):
        if is_shown:
            rest = TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rest


def is_on_purpose(error: BaseException) -> bool:
    """Whether an error says by itself what is wrong: one of ours that is no bug of ours."""
    return isinstance(error, ActorflowError) and not isinstance(error, InternalError)


def shows_all_frames() -> bool:
    """Whether the environment asks for our frames too."""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError:
        return False
    return settings.shows_all_frames or settings.log_level == "DEBUG"


def _shown(error: BaseException, frames: Sequence[tuple[str, int | None]]) -> list[bool]:
    """Return which frames are shown, by file and line from the outermost to the innermost."""
    files = [file for file, _ in frames]
    users = [is_users(file) for file in files]
    last = max([at for at, is_one in enumerate(users) if is_one], default=-1)
    is_bug = any([is_ours(file) for file in files[last + 1 :]]) and not _is_meant(error, frames)
    if is_bug or last < 0:
        return [True] * len(files)
    shown, is_inside = [], False
    for file, is_one in zip(files, users, strict=True):
        # What we call of Python's library stands between our frames.
        is_inside = is_ours(file) or (is_inside and not is_one)
        shown.append(not is_inside)
    return shown


def _is_meant(error: BaseException, frames: Sequence[tuple[str, int | None]]) -> bool:
    """Whether we raised an error to tell the user something, and not by mistake."""
    if isinstance(error, ActorflowError):
        return is_on_purpose(error)
    # A TypeError of a call with wrong arguments, say: it comes from a line of ours that raises it.
    file, line = frames[-1]
    return is_ours(file) and linecache.getline(file, line or 0).lstrip().startswith("raise ")


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, InternalError) or shows_all_frames() or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    told = traceback.TracebackException(kind, error, trace)
    if _trim(told, error):
        told.print(file=sys.stderr)
    else:  # nothing of ours in it
        sys.__excepthook__(kind, error, trace)


def _trim(told: traceback.TracebackException | None, error: BaseException | None) -> bool:
    """Take our frames out of the text of an error and of its causes; return whether there were."""
    if told is None or error is None:
        return False
    shown = _shown(error, [(frame.filename, frame.lineno) for frame in told.stack])
    told.stack[:] = [f for f, is_shown in zip(told.stack, shown, strict=True) if is_shown]
    told.__cause__, cause = _first_told(told.__cause__, error.__cause__)
    told.__context__, context = _first_told(told.__context__, error.__context__)
    causes = (_trim(told.__cause__, cause), _trim(told.__context__, context))
    return not all(shown) or any(causes)


def _first_told(
    told: traceback.TracebackException | None, error: BaseException | None
) -> tuple[traceback.TracebackException | None, BaseException | None]:
    """Pass over causes that only say how our threads ended; return the first other one."""
    while told is not None and error is not None and is_on_purpose(error):
        if any([is_users(frame.filename) for frame in told.stack]):
            break
        told, error = told.__cause__ or told.__context__, error.__cause__ or error.__context__
    return told, error


def _lines_of(error: ActorflowError) -> list[str]:
    """Return the text of an error for IPython; what it raises makes IPython show all frames."""
    if not is_on_purpose(error) or shows_all_frames():
        raise NotImplementedError
    told = traceback.TracebackException(type(error), error, error.__traceback__)
    _trim(told, error)
    # The first frames are those of the program that runs cells.
    at = next((at for at, frame in enumerate(told.stack) if is_users(frame.filename)), 0)
    told.stack[:] = told.stack[at:]
    return "".join(told.format()).splitlines()
