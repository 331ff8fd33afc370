"""What a change of shape costs the C compiler: functions, how many are new, starts and seconds.

    python benchmarks/bench_texts.py [--rounds 3] [--kinds gpt,convolutions]

A GPT of two blocks and a small convolutional net are compiled for training, each time by a process
of its own, all of which have one cache that is empty at first. Shapes change from one process to
the next: the batch, the length or the extent of pictures, the width. The graph, the choice of
kernels and the plan are made anew each time, so the processor's seconds of the compiler are told
by themselves: of all its starts, of which as many run at once as there are threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CHANGES = {
    "cold": {},
    "batch 8 -> 12": {"batch": 12},
    "length or extent 64 -> 48": {"extent": 48},
    "width 64 -> 96": {"width": 96},
    "batch 8 -> 1": {"batch": 1},
}
SIZES = {"batch": 8, "extent": 64, "width": 64}
WORDS = 65


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(MODELS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compiled(options.kinds, **json.loads(options.one))))
        return
    for kind in options.kinds.split(","):
        rounds = [measured(kind) for _ in range(options.rounds)]
        print(f"\n| {kind} | functions | new | starts | compiler CPU s | job.compile s |")
        print("|---|--:|--:|--:|--:|--:|")
        for change in CHANGES:
            rows = [by_change[change] for by_change in rounds]
            cells = [statistics.median([row[name] for row in rows]) for name in rows[0]]
            print(f"| {change} | {' | '.join([f'{cell:.4g}' for cell in cells])} |", flush=True)


def measured(kind: str) -> dict[str, dict[str, float]]:
    """Return what each change costs, in their order, from an empty cache on."""
    rows, seen = {}, set[str]()
    with tempfile.TemporaryDirectory() as cache:
        environ = {**os.environ, "ACTORFLOW_CACHE": cache}
        for change, sizes in CHANGES.items():
            command = [sys.executable, __file__, "--kinds", kind, "--one", json.dumps(sizes)]
            output = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, env=environ
            ).stdout
            row = json.loads(output.splitlines()[-1])
            names = {*row.pop("names")}
            rows[change] = {"functions": len(names), "new": len(names - seen), **row}
            seen |= names
    return rows


def gpt(batch: int, extent: int, width: int):
    """Return a GPT, and the types of its batches."""
    import actorflow as af
    from actorflow import nn

    class Gpt(nn.Module):
        def __init__(self):
            self.emb, self.pos = nn.Embedding(WORDS, width), nn.Embedding(extent, width)
            self.blocks = [nn.TransformerBlock(width, heads=4, causal=True) for _ in range(2)]
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

        def __call__(self, x):
            h = self.emb(x) + self.pos.weight
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h)).flatten(0, -2)

    ids = af.TensorType(af.DType.INT32, (batch, extent))
    return Gpt(), {"x": ids, "y": ids}


def convolutions(batch: int, extent: int, width: int):
    """Return three convolutions with batch norms and a classifier, and the types of its batches."""
    import actorflow as af
    from actorflow import nn

    class Convolutions(nn.Module):
        def __init__(self):
            widths = (3, width, width, 2 * width)
            self.layers = [
                nn.Conv2d(a, b, 3, padding=1, stride=2) for a, b in itertools.pairwise(widths)
            ]
            self.norms = [nn.BatchNorm2d(b) for b in widths[1:]]
            self.head = nn.Linear(2 * width, WORDS)

        def __call__(self, x):
            for layer, norm in zip(self.layers, self.norms, strict=True):
                x = af.relu(norm(layer(x)))
            return self.head(x.mean((2, 3)))

    pictures = af.TensorType(af.DType.FLOAT32, (batch, 3, extent, extent))
    return Convolutions(), {"x": pictures, "y": af.TensorType(af.DType.INT32, (batch,))}


MODELS = {"gpt": gpt, "convolutions": convolutions}


def compiled(kind: str, **sizes: int) -> dict[str, object]:
    """Compile for sizes in this process; return its functions, starts of the compiler, seconds."""
    import actorflow as af
    from actors.kernels.host import catalogue
    from actors.kernels.library.toolchain import Toolchain

    starts, build = 0, Toolchain._build

    def counted(chain: Toolchain, text: str, place: Path) -> Path:
        nonlocal starts
        starts += 1
        return build(chain, text, place)

    Toolchain._build = counted

    @af.job(optimizer=af.optim.AdamW(1e-3))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y.flatten())

    model, types = MODELS[kind](**SIZES | sizes)
    began = time.perf_counter()
    plan = train.compile(model, types)
    whole = time.perf_counter() - began
    functions = catalogue.functions_of(plan, catalogue.kernels_by_name())
    return {
        "names": [function.name for function in functions],
        "starts": starts,
        "compiler": resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime,
        "whole": whole,
    }


if __name__ == "__main__":
    main()
