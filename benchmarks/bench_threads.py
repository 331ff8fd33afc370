"""How long a thread that sleeps has to wait for a core, and the interpreter, while a job trains.

    python benchmarks/bench_threads.py [--seconds 6] [--layers 2]

A Python thread sleeps 0.5 ms, again and again, and notes how much later it wakes. It stands for
the threads that read data, write checkpoints and talk to other ranks. Measured in an idle process,
while a GPT trains with native kernels (a chain is one C call: the interpreter is free), and while
it trains with numpy's kernels. Prints a Markdown table of the extra time in ms.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SLEEP_S = 0.0005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--case", choices=("idle", "training"), help="run one case in this process")
    args = parser.parse_args()
    if args.case:
        extra = np.array(measured(args)) * 1e3
        print(f"{np.median(extra):.3f} {np.percentile(extra, 99):.3f} {extra.max():.3f}")
        return
    print("| the job | p50 ms | p99 ms | most ms |\n|---|---|---|---|", flush=True)
    for label, case, native in (
        ("none", "idle", "1"),
        ("GPT, native kernels", "training", "1"),
        ("GPT, numpy's kernels", "training", "0"),
    ):
        command = [sys.executable, __file__, "--case", case]
        command += ["--seconds", str(args.seconds), "--layers", str(args.layers)]
        environ = os.environ | {"ACTORFLOW_NATIVE": native}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        print(f"| {label} | {' | '.join(ended.stdout.split())} |", flush=True)


def measured(args: argparse.Namespace) -> list[float]:
    """Return the extra seconds of every wake."""
    wakes: list[float] = []
    is_over = threading.Event()

    def sleep_and_note() -> None:
        while not is_over.is_set():
            before = time.perf_counter()
            time.sleep(SLEEP_S)
            wakes.append(time.perf_counter() - before - SLEEP_S)

    thread = threading.Thread(target=sleep_and_note)
    if args.case == "idle":
        thread.start()
        time.sleep(args.seconds)
    else:
        from gpt_jobs import make_job, make_model

        model, data = make_model(args.layers)
        steps = make_job().stream(model, data)
        next(steps)  # compiled, loaded and warm
        thread.start()
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            next(steps)
        steps.close()
    is_over.set()
    thread.join()
    return wakes


if __name__ == "__main__":
    main()
