"""What options of a training job cost a GPT: bytes of the arena, and time of a step.

    python benchmarks/bench_training_options.py [--layers 6] [--rounds 6] [--steps 6]

One GPT, bare and with each option: clip_norm, ema, groups, all three, on_nan="skip", an
af.debug.check of logits and loss, and debug="nan". The plans run in turns in this process, so that
all see the same machine; the median over rounds of the quotient of neighbours counts. Prints a
table.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpt_jobs import DECAY, RATE, make_model

BARE = "bare"


def make_jobs():
    """Return jobs by name, and what else `fit` is told for them."""
    import actorflow as af

    def gpt(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    def checked(model, batch):
        logits = model(batch.x)
        loss = af.cross_entropy(logits.flatten(0, -2), batch.y.flatten())
        af.debug.check(logits)
        af.debug.check(loss)
        return loss

    def job(groups=(), function=gpt, **options):
        optimizer = af.optim.AdamW(RATE, weight_decay=DECAY, groups=groups)
        return af.job(function, optimizer=optimizer, **options)

    groups = [
        af.optim.group("*.bias", "*norm*", weight_decay=0.0),
        af.optim.group("emb.*", "pos.*", lr_scale=0.5),
    ]
    return {
        BARE: (job(), {}),
        "clip_norm": (job(clip_norm=1.0), {}),
        "ema": (job(ema=0.999), {}),
        "groups": (job(groups), {}),
        "all three": (job(groups, clip_norm=1.0, ema=0.999), {}),
        "on_nan=skip": (job(), {"on_nan": "skip"}),
        "debug.check": (job(function=checked), {}),
        "debug=nan": (job(debug="nan"), {}),
    }


def step_seconds(job, model, data, steps: int, told) -> float:
    """Return the median time of a step of a fit, its first one left out."""
    times: list[float] = []
    job.fit(
        model, data, steps=steps, progress=False, **told,
        on_step=lambda step, metrics: times.append(time.perf_counter()),
    )  # fmt: skip
    return statistics.median([b - a for a, b in pairwise(times)])


def main() -> None:
    """Compile and run all plans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    model, data = make_model(options.layers)
    jobs = make_jobs()
    plans = {name: job.compile(model, data, **kwargs) for name, (job, kwargs) in jobs.items()}
    rounds = [
        {n: step_seconds(j, model, data, options.steps, kwargs) for n, (j, kwargs) in jobs.items()}
        for _ in range(options.rounds)
    ]
    print("| options | launches | arena MiB | ms per step | more bytes | more time |")
    print("|---|---|---|---|---|---|")
    first = plans[BARE].memory[0].peak_bytes
    for name, plan in plans.items():
        launches = sum([len(actor.launches) for actor in plan.actors])
        peak, ms = plan.memory[0].peak_bytes, statistics.median([r[name] for r in rounds]) * 1e3
        more = statistics.median([r[name] / r[BARE] for r in rounds])
        print(
            f"| {name} | {launches} | {peak / 2**20:.1f} | {ms:.1f} |"
            f" {peak / first - 1:+.1%} | {more - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
