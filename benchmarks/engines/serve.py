"""The child's half of the line protocol: one JSON object per line in, one out.

    {"do": "first"}                        -> {"loss": of the first step, "state_bytes": ...}
    {"do": "losses", "count": 9}           -> {"losses": of the steps that follow}
    {"do": "run", "steps": 8, "chunks": 5} -> {"ms": [of a step, mean over each chunk]}
    {"do": "gemm"}                         -> {"fp32": {library: GFLOP/s of 2048^3}, "bf16": {..}}
    {"do": "launches"}                     -> {"launches": [...]}
    {"do": "quit"}                         -> {"peak_rss": ..., "run_rss": ..., "base_rss": ...}

What fails answers {"error": text} and ends the child. Whatever else the engine prints goes to
stderr. While the child waits it sleeps in a read.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
from rows.all_rows import find_row
from rows.row import Row

GEMM_SIZE, GEMM_REPEATS = 2048, 15
PRECISIONS = ("fp32", "bf16")


class Session(Protocol):
    """A row in an engine, ready to step.

    `describe` says what only this engine knows. One that can tell what each launch costs has
    `launches` besides.
    """

    def step(self) -> float:
        """Run one step and return its loss; for inference the mean of the squared outputs."""

    def run(self, steps: int) -> None:
        """Run some steps and return when the last has ended."""

    def describe(self) -> dict[str, object]: ...


class Engine(Protocol):
    """What one engine offers. Its imports are done."""

    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        """Make a row ready on a device: "host", or "cuda". Raises ValueError for what it cannot."""

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        """Return, by library, a call that multiplies two matrices of 2048 x 2048 and waits."""


def serve(make_engine: Callable[[], Engine]) -> None:
    """Answer the lines of stdin until "quit" or the end of stdin."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = 1
    try:
        _serve(make_engine, out)
        code = 0
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        _answer(out, {"error": f"{type(error).__name__}: {error}".strip()})
    finally:
        # An engine may have threads that wait for work that never comes: nothing is to be wound up,
        # also when whoever asks is gone and the answer finds no reader.
        sys.stderr.flush()
        os._exit(code)


def _serve(make_engine: Callable[[], Engine], out) -> None:
    engine = make_engine()
    name, precision, variant, device = arguments(sys.argv[1:])
    base = resident_bytes("VmRSS")
    session: Session | None = None
    peak = 0
    for line in sys.stdin:
        ask = json.loads(line)
        verb = ask["do"]
        if verb == "quit":
            run = resident_bytes("VmHWM")
            _answer(out, {"peak_rss": max(peak, run), "run_rss": run, "base_rss": base})
            return
        if verb == "gemm":
            products = {precision: engine.gemm(precision) for precision in PRECISIONS}
            _answer(
                out, {p: {n: measured_gflops(f) for n, f in products[p].items()} for p in products}
            )
            continue
        if session is None:
            row = find_row(name)
            state = state_bytes(row)
            session = engine.prepare(row, precision, variant, device)
            answer = {"loss": session.step(), "state_bytes": state}
            _answer(out, answer | session.describe())
        elif verb == "losses":
            _answer(out, {"losses": [session.step() for _ in range(ask["count"])]})
            peak = max(peak, resident_bytes("VmHWM"))
            forget_peak()
        elif verb == "run":
            _answer(out, {"ms": timed(session, ask["steps"], ask["chunks"])})
        elif verb == "launches":
            _answer(out, {"launches": getattr(session, "launches", list)()})
        else:
            raise ValueError(f"expected a verb of the protocol, got {verb!r}")


def arguments(given: list[str]) -> tuple[str, str, str, str]:
    """Return row, precision, variant and device; the host where none is named."""
    name, precision, variant, device = (*given, "", "", "", "")[:4]
    return name, precision, variant, device or "host"


def _answer(out, answer: dict[str, object]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def timed(session: Session, steps: int, chunks: int) -> list[float]:
    """Return the ms of a step in each chunk; one step before them, to wake what slept, is not."""
    session.run(1)
    times = []
    for _ in range(chunks):
        begin = time.perf_counter()
        session.run(steps)
        times.append((time.perf_counter() - begin) * 1e3 / steps)
    return times


def measured_gflops(multiply: Callable[[], object]) -> float:
    multiply()
    best = float("inf")
    for _ in range(GEMM_REPEATS):
        begin = time.perf_counter()
        multiply()
        best = min(best, time.perf_counter() - begin)
    return 2 * GEMM_SIZE**3 / best / 1e9


def gemm_operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = GEMM_SIZE, GEMM_SIZE
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def state_bytes(row: Row) -> int:
    """Return the bytes of the parameters and of the optimizer's state."""
    size = sum(array.nbytes for array in row.weights().values())
    return size * (1 + row.optimizer.num_states)


def mean_square(logits: np.ndarray) -> float:
    """Return what stands for the loss of an inference."""
    return float(np.mean(np.square(logits, dtype=np.float64)))


def round_robin(batches: list) -> Callable[[], object]:
    """Return a function that gives the batches in turn, for ever."""
    numbers = count()
    return lambda: batches[next(numbers) % len(batches)]


def num_threads() -> int:
    return len(os.sched_getaffinity(0))


def resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process, 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    matches = [line for line in lines if line.startswith(field + ":")]
    return int(matches[0].split()[1]) * 1024 if matches else 0


def forget_peak() -> None:
    """Let the peak start anew at what is resident now, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
