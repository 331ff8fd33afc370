"""What a step pays to know that its graph is not stale, and what a full reading costs.

    python benchmarks/bench_identity.py [--repeat 300]

For the model of examples/char_gpt.py and for a GPT of 12 layers: microseconds of the guard that
`step` asks, the best of some short repetitions (another load on the machine only ever adds), and
milliseconds of reading all that a trace may read, which `fit` pays once and `step` after a change.
The mark is 20 us per step on the model of the example.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import char_gpt

import actorflow as af
from actorflow import nn
from actorflow.trace.dependency_scan import read_job
from actorflow.trace.traces import TraceCache
from compiler.graph.graph import Graph

MARK_US = 20.0
SPEC = {
    "x": af.TensorType(af.DType.INT32, (char_gpt.BATCH, char_gpt.SEQ)),
    "y": af.TensorType(af.DType.INT32, (char_gpt.BATCH, char_gpt.SEQ)),
}


class DeepLM(char_gpt.CharLM):
    """The model of the example with 12 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.TransformerBlock(128, heads=4, causal=True) for _ in range(12)]


def best_us(call: object, number: int, repeat: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=300)
    repeat = parser.parse_args().repeat
    job = char_gpt.train
    print(f"{'model':<24} {'modules':>7} {'parameters':>10} {'guard us':>9} {'reading ms':>10}")
    over = False
    for name, model in (("char_gpt, 2 layers", char_gpt.CharLM()), ("12 layers", DeepLM())):
        graph = Graph((), (), ())
        traces = TraceCache(
            job.name, job._function, job.options.optimizer, lambda model, spec, g=graph: g, 4
        )
        traces.current(model, SPEC)
        assert traces.newest(SPEC) is not None
        guard = best_us(lambda t=traces: t.newest(SPEC), 20, repeat)
        reading = best_us(
            lambda m=model: read_job(job._function, job.options.optimizer, m, SPEC), 5, repeat
        )
        counts = len(list(model.named_modules())), len(list(model.named_parameters()))
        print(f"{name:<24} {counts[0]:>7} {counts[1]:>10} {guard:>9.1f} {reading / 1e3:>10.2f}")
        over |= model.__class__ is char_gpt.CharLM and guard > MARK_US
    sys.exit(f"the guard takes more than {MARK_US} us" if over else None)


if __name__ == "__main__":
    main()
