"""How long a thread that sleeps has to wait for a core, and the interpreter, while a job trains.

    python benchmarks/bench_threads.py [--seconds 6] [--layers 2] [--idle]

A Python thread sleeps 0.5 ms, again and again, and notes how much later it wakes. It stands for
the threads that read data, write checkpoints and talk to other ranks. Measured in an idle process,
while a GPT trains with native kernels (a chain is one C call: the interpreter is free), and while
it trains with numpy's kernels. Prints a Markdown table of the extra time in ms.

`--idle` shows what an open job costs that has nothing to do: how often its threads wake in so many
seconds, and their processor time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
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
    parser.add_argument("--idle", action="store_true", help="an open job with nothing to do")
    args = parser.parse_args()
    if args.idle:
        print("| what is open | threads | wakes | CPU ms |\n|---|--:|--:|--:|", flush=True)
        for label, figures in idle_rows(args.seconds):
            print(f"| {label} | {' | '.join(figures)} |", flush=True)
        return
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


Row = tuple[str, tuple[str, str, str]]


def idle_rows(seconds: float) -> Iterator[Row]:
    """Open one thing after the other, and measure the threads that have nothing to do."""
    import actorflow as af
    from actorflow import nn

    x = np.zeros((8, 64), np.float32)
    batch, spec = {"x": x, "y": x}, {n: af.TensorType(af.DType.FLOAT32, x.shape) for n in "xy"}
    train = af.job(optimizer=af.optim.AdamW(1e-3))(lambda m, b: af.mse_loss(m(b.x), b.y))
    scores = af.job(train=False)(lambda m, b: {"y": m(b.x)})
    has_come, may_come = threading.Event(), threading.Event()

    def batches() -> Iterator[dict[str, np.ndarray]]:
        yield from [batch] * 3
        has_come.set()
        may_come.wait()
        yield batch

    model, other = nn.Linear(64, 64).init(0), nn.Linear(64, 64).init(0)
    source = af.data.from_iterable(batches, spec)
    waiting = threading.Thread(
        target=lambda: train.fit(other, source, steps=4, progress=False), name="fit"
    )
    with ExitStack() as stack:
        yield "nothing", idle(seconds)
        train.step(model, batch)
        scores.step(model, {"x": x})
        yield "a training and an evaluation by step", idle(seconds)
        predict = stack.enter_context(scores.predictor(model, {"x": x}, max_wait_ms=5))
        predict({"x": x[:1]})
        yield "and a predictor", idle(seconds)
        waiting.start()
        has_come.wait()
        time.sleep(1)  # the steps of the batches that came
        yield "and a fit that waits for data", idle(seconds)
        may_come.set()
        waiting.join()


def idle(seconds: float) -> tuple[str, str, str]:
    """Return how many threads there are, how often others than this wake, and their CPU time."""
    before = wakes_and_ns()
    time.sleep(seconds)
    after = wakes_and_ns()
    both = [(before.get(task, (0, 0)), now) for task, now in after.items()]
    wakes, ns = [sum([now[i] - then[i] for then, now in both]) for i in (0, 1)]
    return str(len(after) + 1), str(wakes), f"{ns / 1e6:.2f}"


def wakes_and_ns() -> dict[str, tuple[int, int]]:
    """Return how often each thread but this one was put on a core, and for how long."""
    own = str(threading.get_native_id())
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        if folder.name != own:
            on_core, _, slices = (folder / "schedstat").read_text(encoding="ascii").split()
            found[folder.name] = int(slices), int(on_core)
    return found


if __name__ == "__main__":
    main()
