"""A row in torch, in a process of its own.

    python benchmarks/gpu/rival.py ROW VARIANT [--only-compile]

Prints the losses of its first steps and how long they took as a line of JSON, waits for a line, and
prints a line of what a step takes and the bytes at the peak: so several can compile at once, and
each is timed alone. With --only-compile it ends after its first steps.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from statistics import median

from rows.all_rows import find_row

ONLY_COMPILE = "--only-compile"
NUM_LOSSES = 5
TURN_S, TURNS = 0.6, 3
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the system kill this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    # What starts this may be killed, and stops it: it is in a group of its own.
    end_with_parent()
    import torch
    from engines.torch_engine import Torch

    name, variant, *options = sys.argv[1:]
    row, began = find_row(name), time.perf_counter()
    session = Torch().prepare(row, row.precisions[-1], variant, "cuda")
    losses = [session.step() for _ in range(NUM_LOSSES)]
    first_s = time.perf_counter() - began
    _say({"losses": losses, "first_steps_s": first_s, "settings": session.settings})
    if ONLY_COMPILE in options:
        return 0
    # What only compiling or trying took is given back; the peak is that of steps.
    torch.cuda.empty_cache()
    sys.stdin.readline()
    torch.cuda.reset_peak_memory_stats()
    step_s = seconds_of(session)
    _say({"step_s": step_s, "peak_bytes": torch.cuda.max_memory_allocated()})
    return 0


def seconds_of(session) -> float:
    """Return what a step takes: the median of some turns."""
    session.run(3)
    began = time.perf_counter()
    session.run(3)
    count = max(2, int(TURN_S / max((time.perf_counter() - began) / 3, 1e-6) / TURNS))
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        session.run(count)
        times.append((time.perf_counter() - began) / count)
    return median(times)


def _say(words: dict[str, object]) -> None:
    # Other lines are whatever torch prints.
    print(f"\nrival: {json.dumps(words)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
