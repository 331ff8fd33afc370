"""The main job: throughput, start, compile and import, as a Markdown table.

    python benchmarks/bench_main_job.py [--steps 300] [--repeats 5]

Medians over repeats in fresh processes, or over steps without the first ten. The load before the
run is printed above the figures: they mean little when it is not near zero.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOLDING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

STARTED = """
import sys, time
sys.path.insert(0, {examples!r})
import char_gpt as demo
import actorflow as af
data = af.data.Tokens(demo.read_text(), seq=demo.SEQ, batch=demo.BATCH, seed=0)
seen = []
demo.train.fit(demo.CharLM(), data, steps=int(sys.argv[2]), checkpoint=sys.argv[1], progress=False,
               on_step=lambda step, metrics: seen.append(time.time()))
print(seen[0])
"""

IMPORTED = """
import time
before = time.perf_counter()
import actorflow
print(time.perf_counter() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--neighbour", action="store_true", help="only the throughput, beside a busy process"
    )
    args = parser.parse_args()
    for name in HOLDING:
        os.environ.pop(name, None)
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    print_machine()
    print("| what | mark | measured |\n|---|---|---|")
    if args.neighbour:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            throughput(args.steps)
        finally:
            busy.kill()
            busy.wait()
        return
    throughput(args.steps)
    starts(args.repeats)
    compile_demo(args.repeats)
    compile_deep(args.repeats)
    imports(args.repeats)


def print_machine() -> None:
    import numpy as np

    from actors.kernels.library.openblas import loaded_blas

    blas = loaded_blas()
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}, numpy {np.__version__}, BLAS {blas}; load average before"
        f" {os.getloadavg()[0]:.2f}\n"
    )


def row(what: str, mark: str, measured: str) -> None:
    print(f"| {what} | {mark} | {measured} |", flush=True)


def throughput(steps: int) -> None:
    import char_gpt as demo

    import actorflow as af

    data = af.data.Tokens(demo.read_text(), seq=demo.SEQ, batch=demo.BATCH, seed=0)
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        demo.train.fit(
            demo.CharLM(),
            data,
            steps=steps,
            checkpoint=directory,
            progress=False,
            on_step=lambda step, metrics: ends.append(time.perf_counter()),
        )
    gaps = [b - a for a, b in pairwise(ends[9:])]
    tokens = demo.SEQ * demo.BATCH
    step = statistics.median(gaps)
    whole = tokens * len(gaps) / (ends[-1] - ends[9])
    row("demo, tokens/s, median step", ">= 25,000", f"{tokens / step:,.0f} ({step * 1e3:.1f} ms)")
    row("demo, tokens/s, whole run with checkpoints", ">= 25,000", f"{whole:,.0f}")


def starts(repeats: int) -> None:
    program = STARTED.format(examples=str(ROOT / "examples"))
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ACTORFLOW_CACHE": str(Path(directory) / "cache"),
        }
        seconds = []
        for repeat in range(repeats + 1):
            before = time.time()
            process = subprocess.run(
                [sys.executable, "-c", program, str(Path(directory) / "run"), str(repeat + 1)],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            seconds.append(float(process.stdout) - before)
    row("process start to first step, cold (compiles)", "-", f"{seconds[0]:.2f} s")
    later = statistics.median(seconds[1:])
    row("second start to its first step (resumes)", "< 1.0 s", f"{later:.2f} s")


def compile_demo(repeats: int) -> None:
    import char_gpt as demo

    from actorflow.compile.hardware import hardware_for
    from compiler.contract.placement import HOST
    from compiler.contract.types import DType, TensorType
    from compiler.graph.target import CompileOptions
    from compiler.pipeline.pipeline import compile_graph

    tokens = TensorType(DType.INT32, (demo.BATCH, demo.SEQ))
    seconds = []
    for _ in range(repeats):
        before = time.perf_counter()
        graph = demo.train.graph(demo.CharLM(), {"x": tokens, "y": tokens})
        compile_graph(graph, hardware_for((HOST,)), CompileOptions("train", snapshot_seconds=5.0))
        seconds.append(time.perf_counter() - before)
    row("trace and compile of the demo", "<= 1 s", f"{statistics.median(seconds):.3f} s")


def compile_deep(repeats: int) -> None:
    """Compile training graphs of Linear + GELU + residual layers of growing depth."""
    import actorflow as af
    from actorflow import nn
    from actorflow.compile.hardware import hardware_for
    from compiler.contract.placement import HOST
    from compiler.contract.types import DType, TensorType
    from compiler.graph.target import CompileOptions
    from compiler.passes import autodiff
    from compiler.pipeline.pipeline import compile_graph

    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            self.layers = [nn.Linear(16, 16) for _ in range(depth)]

        def __call__(self, x: af.Tensor) -> af.Tensor:
            for layer in self.layers:
                x = x + af.gelu(layer(x), approximate="tanh")
            return x

    @af.job(optimizer=af.optim.AdamW(1e-3), max_plans=1000)
    def train(model: nn.Module, batch: af.Tensor) -> af.Tensor:
        return model(batch.x).mean()

    spec = {"x": TensorType(DType.FLOAT32, (8, 16))}
    measured: list[tuple[int, float]] = []
    for depth in (43, 430):
        seconds, nodes = [], 0
        for _ in range(max(1, repeats - 2)):
            before = time.perf_counter()
            graph = train.graph(Deep(depth), spec)
            compile_graph(graph, hardware_for((HOST,)), CompileOptions("train"))
            seconds.append(time.perf_counter() - before)
            nodes = len(autodiff.differentiate(graph).nodes)
        measured.append((nodes, statistics.median(seconds)))
    (small, fast), (large, slow) = measured
    import math

    slope = math.log(slow / fast) / math.log(large / small)
    row(
        f"trace and compile of a training graph of {large:,} nodes",
        "<= 5 s, near-linear",
        f"{slow:.2f} s ({small:,} nodes: {fast:.2f} s; log-log slope {slope:.2f})",
    )


def imports(repeats: int) -> None:
    seconds = []
    for _ in range(repeats):
        process = subprocess.run(
            [sys.executable, "-c", IMPORTED],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds.append(float(process.stdout))
    row("import actorflow, numpy included", "<= 0.3 s", f"{statistics.median(seconds):.3f} s")


if __name__ == "__main__":
    main()
