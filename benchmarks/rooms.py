"""The way of one compilation through the house: which rooms it enters, and to which it returns.

    python benchmarks/rooms.py [--all]

A room is a folder, such as compiler/passes. Leaders are the functions that a reader follows from
the job to its plan (`LEADERS`). What a leader calls in another file is a stop; what a stop calls is
not counted. `--all` counts every call instead, which says how often one part asks another.

Rooms are small, so a compilation comes back to some of them: `RETURNS` has each return and its
reason.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
WINGS = tuple([f"{ROOT / wing}{os.sep}" for wing in ("actorflow", "actors", "compiler", "memory")])

LEADERS = (
    "Job._plan",
    "plan_for",
    "compiled_plan",
    "compile_graph",
    "local_graphs",
    "run_passes",
    "_within_budget",
    "lower",
)
"""Functions by their qualified names, from the outside in."""

THROUGH = ("of_graph.<locals>.<lambda>", "proof.<locals>.once", "<lambda>")
"""Functions that only call what they were made of, such as the lambdas of `PASSES`: they are no
stops, and their caller leads on."""

WORDS = str(ROOT / "compiler" / "contract")
"""The room of the values that all rooms exchange. To ask such a value is no stop."""

RETURNS = (
    (
        "compiler/pipeline",
        "the fingerprint of a plan is that of the traced graph, so it is taken before any pass",
    ),
    (
        "compiler/lowering",
        "buckets of collectives follow the order of launches, which compiler/storage decides",
    ),
    (
        "compiler/fusion",
        "updates are joined last: whether that raises the peak shows in the final order, after a"
        " budget has chosen",
    ),
    ("compiler/lowering", "the tables of a plan are made of the launches as they run"),
)
"""The rooms to which a compilation comes back, in order, each with the reason."""

Stop = tuple[str, str, str]
"""Room, file and function."""


def stops(work: Callable[[], object], *, only_led: bool = True) -> list[Stop]:
    """Return what leaders call while some work is done, in order; or all calls."""
    calls: list[Stop] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and _is_ours(frame) and (not only_led or _is_led(frame)):
            code = frame.f_code
            path = Path(code.co_filename).relative_to(ROOT)
            calls.append((str(path.parent), path.name, code.co_qualname))

    with _profiled(watch):
        work()
    return calls


def returns(found: list[Stop]) -> list[str]:
    """Return the rooms that are entered after they were left, each time."""
    rooms = [room for room, _, _ in found]
    entered = [room for i, room in enumerate(rooms) if i == 0 or rooms[i - 1] != room]
    return [room for i, room in enumerate(entered) if room in entered[:i]]


@contextmanager
def _profiled(watch: Callable[[FrameType, str, object], None]) -> Iterator[None]:
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def _is_ours(frame: FrameType) -> bool:
    is_function = frame.f_code.co_name not in ("<module>", "<lambda>", "<listcomp>")
    return is_function and frame.f_code.co_filename.startswith(WINGS)


def _is_led(frame: FrameType) -> bool:
    """Whether a leader calls, in person or in a list or lambda of its own."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_qualname in THROUGH:
        caller = caller.f_back
    if (
        frame.f_code.co_qualname in THROUGH
        or caller is None
        or caller.f_code.co_filename == frame.f_code.co_filename
        or os.path.dirname(frame.f_code.co_filename) == WORDS
    ):
        return False  # a leader's own helper is no stop
    return caller.f_code.co_qualname.split(".<locals>")[0] in LEADERS


def compilation(units: int) -> Callable[[], object]:
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    os.environ["ACTORFLOW_CACHE"] = "off"
    from bench_compile import make

    job, model, types = make("transformer", units)
    return lambda: job.compile(model, types)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    compilation(1)()  # what is made once belongs to no compilation
    calls = stops(compilation(2), only_led=not options.all)
    again, last_room = returns(calls), ""
    for room, file, function in calls if not options.all else ():
        print(f"{room if room != last_room else '':<28}{file}: {function}")
        last_room = room
    rooms = {room for room, _, _ in calls}
    print(f"{len(rooms)} rooms, {len(again)} returns, {len(calls)} stops")
    for number, room in enumerate(again if not options.all else ()):
        expected, reason = RETURNS[number] if number < len(RETURNS) else ("", "")
        print(f"  back to {room}: {reason if room == expected else 'no reason is given'}")


if __name__ == "__main__":
    main()
