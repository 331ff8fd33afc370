"""What it costs that a broken step can be skipped: bytes of the arena, and time of a step.

    python benchmarks/bench_skip.py [--layers 6] [--rounds 6] [--steps 4]

One GPT, compiled with on_nan="raise" and "skip"; both plans run in turns in this process, and the
shortest step of each counts. Prints a table.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_jobs import make_job, make_model

POLICIES = ("raise", "skip")


def main() -> None:
    """Compile and run both plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    job = make_job()
    model, data = make_model(options.layers)
    plans = {policy: job.compile(model, data, on_nan=policy) for policy in POLICIES}
    best = dict.fromkeys(POLICIES, float("inf"))
    for _ in range(options.rounds):
        for policy in POLICIES:
            times: list[float] = []
            job.fit(
                model, data, steps=options.steps, on_nan=policy, progress=False,
                on_step=lambda step, metrics, times=times: times.append(time.perf_counter()),
            )  # fmt: skip
            best[policy] = min(best[policy], *[b - a for a, b in pairwise(times)])
    print("| on_nan | launches | arena MiB | ms per step | more bytes | more time |")
    print("|---|---|---|---|---|---|")
    first = plans["raise"].memory[0].peak_bytes
    for policy, plan in plans.items():
        launches = sum([len(actor.launches) for actor in plan.actors])
        peak, ms = plan.memory[0].peak_bytes, best[policy] * 1e3
        more = f"{peak / first - 1:+.1%} | {best[policy] / best['raise'] - 1:+.1%}"
        print(f"| {policy} | {launches} | {peak / 2**20:.1f} | {ms:.1f} | {more} |")


if __name__ == "__main__":
    main()
