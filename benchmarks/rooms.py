"""The way of a compilation, or of a `fit`, through the house: the rooms, and the returns to them.

    python benchmarks/rooms.py [--fit] [--all]

A room is a folder, such as compiler/passes. Leaders are the functions that a reader follows: from
the job to its plan (`LEADERS`), or with `--fit` all functions of the files from the user's call of
`fit` to the start of the loop (`FIT_FILES`), with the options on the way. What a leader calls in
another file is a stop; what a stop calls is not counted. `--all` counts every call instead, which
says how often one part asks another.

Rooms are small, so a way comes back to some of them: `RETURNS` and `FIT_RETURNS` have each return
and its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

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

FIT_FILES = (
    "actorflow/jobs/job.py",
    "actorflow/jobs/job_spec.py",
    "actorflow/run/open_model.py",
    "actorflow/run/runner.py",
    "actorflow/run/fitting.py",
    "actorflow/run/training_run.py",
)
"""Files whose functions lead from `fit` to the loop, from the outside in."""

THROUGH = (
    "of_graph.<locals>.<lambda>",
    "proof.<locals>.once",
    "accepts_options.<locals>.decorate.<locals>.call",
    "<lambda>",
    "<listcomp>",
    *(
        "devices_of",
        "group_of",
        "mesh_of",
        "ranks_of",
    ),  # methods of `Job`, which has a file for its ranks
)
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

_NEW_MODEL = "a model that is new to a job gets its lock, and its table of traces"
_DEVICES = "a trace is of the devices that the environment names when it is made"
_VALUES = "the model's first values are made once its plan is there"
_PARTS = "a run opens its parts one after the other"

FIT_RETURNS = (
    ("actorflow/nn", _NEW_MODEL),
    ("actorflow/nn", _NEW_MODEL),
    ("actorflow/trace", _NEW_MODEL),
    ("actorflow/options", _DEVICES),
    ("actorflow/environment", _DEVICES),
    ("actorflow/trace", _DEVICES),
    (
        "actorflow/jobs",
        "what the compiler is told is put together when graph and devices are known",
    ),
    ("actorflow/options", "the compiler is told what the options of the job come to"),
    ("actorflow/nn", "the model is claimed before anything is compiled"),
    ("actorflow/nn", "the model keeps the graphs of its job"),
    ("actorflow/trace", "a line says why there is another graph, and what its plan took"),
    ("actorflow/jobs", "the graph says which variables the model has to have"),
    ("actorflow/nn", _VALUES),
    ("actorflow/distributed", "ranks compare their plans before kernels are built"),
    ("actorflow/run", "the plan is proven here"),
    ("actorflow/options", "the plan says how many batches of an epoch a step takes"),
    ("actorflow/run", "what a run needs is opened when its steps are known"),
    ("actorflow/distributed", "ranks compare steps and data before a checkpoint is read"),
    ("actorflow/compile", "the plan says after which steps there can be a checkpoint"),
    ("actorflow/distributed", "ranks prove that they see one run directory when it is opened"),
    ("actorflow/run", "the checkpoint is read after it"),
    ("actorflow/distributed", "ranks compare the values that they begin with"),
    ("actorflow/run", "who saves and hears is made once the first step is known"),
    (
        "actorflow/distributed",
        "memory is shared once the ports are made, which may refuse the data",
    ),
    ("actorflow/run", _PARTS),
    ("actorflow/compile", "the plan says which credits are there at that step"),
    ("actors/machine", "the graph of actors begins with these credits"),
    ("actorflow/run", "variables are read and written through the loop"),
    ("actorflow/run", "the progress line counts what the source calls its items"),
    ("actorflow/nn", "the model is lent to the run just before its first step"),
    ("actorflow/run", _PARTS),
    ("actors/loop", "the loop starts last"),
)
"""The same of a `fit`, up to the start of the loop."""

Stop = tuple[str, str, str]
"""Room, file and function."""


def stops(work: Callable[[], object], leads: Callable[[CodeType], bool] | None) -> list[Stop]:
    """Return what leaders call while some work is done, in order; without leaders all calls."""
    calls: list[Stop] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and _is_ours(frame) and (leads is None or _is_led(frame, leads)):
            code = frame.f_code
            path = Path(code.co_filename).relative_to(ROOT)
            calls.append((str(path.parent), path.name, code.co_qualname))

    with _profiled(watch):
        work()
    return calls


def leads_compilation(code: CodeType) -> bool:
    return code.co_qualname.split(".<locals>")[0] in LEADERS


def leads_fit(code: CodeType) -> bool:
    return code.co_filename in [str(ROOT / file) for file in FIT_FILES]


def until_loop(calls: list[Stop]) -> list[Stop]:
    """Return the calls up to the start of the loop."""
    return calls[: calls.index(("actors/loop", "loop.py", "Loop.start")) + 1]


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


def _is_led(frame: FrameType, leads: Callable[[CodeType], bool]) -> bool:
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
    return leads(caller.f_code)


def compilation(units: int) -> Callable[[], object]:
    _find_house()
    from bench_compile import make

    job, model, types = make("transformer", units)
    return lambda: job.compile(model, types)


def fit() -> Callable[[], object]:
    """Return a call of `fit` with a checkpoint and a seed, of a new job on a new model."""
    _find_house()
    import numpy as np

    import actorflow as af

    @af.job(optimizer=af.optim.SGD(0.1))
    def train(model, batch):
        return af.mse_loss(model(batch.x), batch.x)

    source = af.data.ArraySource({"x": np.ones((16, 8), np.float32)}, batch=4)

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            train.fit(
                af.nn.Linear(8, 8), source, steps=2, checkpoint=folder, seed=1, progress=False
            )

    return work


def _find_house() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    os.environ["ACTORFLOW_CACHE"] = "off"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    # What is made once belongs to no compilation, and to no run.
    (fit() if options.fit else compilation(1))()
    work = fit() if options.fit else compilation(2)
    calls = stops(work, None if options.all else leads_fit if options.fit else leads_compilation)
    calls = until_loop(calls) if options.fit else calls
    again, last_room = returns(calls), ""
    for room, file, function in calls if not options.all else ():
        print(f"{room if room != last_room else '':<28}{file}: {function}")
        last_room = room
    rooms = {room for room, _, _ in calls}
    print(f"{len(rooms)} rooms, {len(again)} returns, {len(calls)} stops")
    reasons = FIT_RETURNS if options.fit else RETURNS
    for number, room in enumerate(again if not options.all else ()):
        expected, reason = reasons[number] if number < len(reasons) else ("", "")
        print(f"  back to {room}: {reason if room == expected else 'no reason is given'}")


if __name__ == "__main__":
    main()
