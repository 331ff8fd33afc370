"""Eager mode: what an op costs beside its kernel, and a step of a GPT beside torch.

    python benchmarks/bench_eager.py [--layers 6] [--steps 8] [--rounds 3] [--no-torch]

An op is timed on tensors of 16 by 16, whose kernels take 1 to 3 us: the best of some rounds, by
the processor time of the thread. The steps of `gpt_jobs.py` run in a process for each engine, in
turns; of each engine it shows the median of the rounds. torch is needed for the comparison alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CALLS, BLOCKS = 400, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-torch", action="store_true")
    args = parser.parse_args()
    for name, microseconds in ops().items():
        print(f"{name:16} {microseconds:6.1f} us")
    engines = ["actorflow-eager", "actorflow", *([] if args.no_torch else ["torch"])]
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for _ in range(args.rounds):
        for engine in engines:
            times[engine].append(step_of(engine, args.layers, args.steps))
    if not args.rounds:
        return
    for engine, each in times.items():
        print(f"{engine:16} {statistics.median(each):8.1f} ms a step {[round(t, 1) for t in each]}")
    if "torch" in times:
        ratio = statistics.median(times["actorflow-eager"]) / statistics.median(times["torch"])
        print(f"eager / torch    {ratio:8.2f}")


def ops() -> dict[str, float]:
    """Return the microseconds of an op, its kernel included, by name."""
    import actorflow as af

    with af.eager():
        x, y = af.ones((16, 16)), af.ones((16, 16))
        calls: dict[str, Callable[[], object]] = {
            "x + y": lambda: x + y,
            "x * 2.0": lambda: x * 2.0,
            "x @ y": lambda: x @ y,
            "x.reshape(256)": lambda: x.reshape(256),
            "gelu(x)": lambda: af.gelu(x),
            "x.sum(0)": lambda: x.sum(0),
            "softmax(x, -1)": lambda: af.softmax(x, -1),
        }
        return {name: best_of(call) for name, call in calls.items()}


def best_of(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    times = []
    for _ in range(BLOCKS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time() - start) / CALLS)
    return min(times) * 1e6


def step_of(engine: str, layers: int, steps: int) -> float:
    """Return the median milliseconds of a step, of a process of its own."""
    script = ROOT / "benchmarks" / "gpt_jobs.py"
    command = [sys.executable, str(script), engine, "--layers", str(layers), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["ms"])


if __name__ == "__main__":
    main()
