"""What a step takes on fewer cores, beside another training, and beside a process that is busy.

    python benchmarks/bench_neighbours.py [ROW ...] [--rounds 5] [--turn-ms 600]

Each row of `actorflow bench` (gpt, or gpt:bf16) runs in processes of its own: one that may use one
core, and two that may use all. A round measures, one after another: the step on one core; on all;
of both trainings at once, each with all cores; and on all beside a process that spins. Printed are
medians of the rounds:

- scaling: the step on one core, over the cores times the step on all. The mark is 0.85.
- side by side: the slower step of the two at once, over the step on one of two cores, which is what
  a fair half of this machine gives. The mark is 1.10. With more than two cores it is over the cores
  times half the step on one core.
- busy: the step beside the spinning process over the step alone. The mark is 2.0.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from rows.all_rows import find_row  # noqa: E402

from benchmarks.compare.engines import Child  # noqa: E402
from benchmarks.compare.measure import busy_core  # noqa: E402

ENGINE = ROOT / "benchmarks" / "engines" / "actorflow_engine.py"
NUM_WARM = 5
ROWS = ("tiny", "mlp", "gpt", "lstm", "resnet-18", "resnet-50", "wide-deep")


def engine(name: str, precision: str, cores: str) -> Child:
    """Start an engine of a row that may use some cores, as taskset names them; steps are warm."""
    command = ["taskset", "--cpu-list", cores, sys.executable, str(ENGINE), name, precision]
    child = Child(f"{name} on cores {cores}", command, os.environ)
    child.ask("first")
    child.ask("losses", count=NUM_WARM)
    return child


def step_ms(child: Child, steps: int) -> float:
    """Return the median ms of a step, of three chunks."""
    return median(child.ask("run", steps=steps, chunks=3)["ms"])


def measured(name: str, precision: str, rounds: int, turn_ms: float) -> list[str]:
    """Return the cells of a row."""
    cores = sorted(os.sched_getaffinity(0))
    everywhere = ",".join(map(str, cores))
    alone: list[float] = []
    scaling: list[float] = []
    beside: list[float] = []
    busy: list[float] = []
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        single = stack.enter_context(engine(name, precision, str(cores[0])))
        pair = [stack.enter_context(engine(name, precision, everywhere)) for _ in range(2)]
        steps = max(1, int(turn_ms / 3 / step_ms(pair[0], 1)))
        for _ in range(rounds):
            one, all_ = step_ms(single, max(1, steps // len(cores))), step_ms(pair[0], steps)
            both = max(pool.map(lambda child: step_ms(child, steps), pair))
            with busy_core():
                disturbed = step_ms(pair[0], steps)
            alone.append(all_)
            scaling.append(one / (len(cores) * all_))
            beside.append(both / (one * 2 / len(cores)))
            busy.append(disturbed / all_)
    spread = f"{min(beside):.2f} to {max(beside):.2f}"
    return [
        f"{median(alone):.3f}", f"{median(scaling):.2f}", f"{median(beside):.2f} ({spread})",
        f"{median(busy):.2f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="ROW")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-ms", type=float, default=600.0)
    args = parser.parse_args()
    print("| row | ms | scaling | side by side | busy |\n|---|--:|--:|--:|--:|", flush=True)
    for row in args.rows:
        name, _, precision = row.partition(":")
        find_row(name)
        cells = measured(name, precision or "fp32", args.rounds, args.turn_ms)
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
