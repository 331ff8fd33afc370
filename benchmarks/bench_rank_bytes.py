"""Bytes that a rank has: of parameters and optimizer under zero, and with classes in parts.

    python benchmarks/bench_rank_bytes.py [--ranks 1,2,3,4,8]

Plans alone, nothing runs. `zero`: a GPT with AdamW on data=P. Its state by formula is three numbers
of 4 bytes (the parameter and both moments) for each of a parameter's rows that the rank has, the
first n mod P ranks one more; beside it, what the plan's registers of variables take in the arena.
`classes`: a linear layer and cross entropy over classes in parts along model=P, as face recognition
has it (Deng et al., ArcFace, 2019): all that a rank's plan takes, the share of it of P = 1, and the
largest tensor that ranks exchange, beside the bytes of one rank's logits. Last, all that a plan of
a deeper GPT takes on data=2 with several batches a step, and with blocks that run again.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("ACTORFLOW_NATIVE", "0")  # nothing is built for what does not run
os.environ.setdefault("ACTORFLOW_CACHE", "off")

import actorflow as af
from actorflow import nn
from compiler.contract.plan import Plan
from compiler.contract.rank_plans import collective_groups

SEQ, WIDTH, VOCABULARY, LAYERS, ROWS = 64, 100, 1000, 2, 24
FEATURES, CLASSES, FACES = 512, 100_000, 64
DEEP = 6
"""Layers of the GPT whose blocks run again."""
STATE = 3
"""Tensors of a parameter's shape that last: itself, and two moments of AdamW."""


class GPT(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary]."""

    def __init__(self, layers: int) -> None:
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = [nn.TransformerBlock(WIDTH, heads=4, causal=True) for _ in range(layers)]
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def __call__(self, x: af.Tensor) -> af.Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def gpt_plan(
    num_ranks: int, rank: int, *, layers: int = LAYERS, **options: object
) -> tuple[nn.Module, Plan]:
    """Return the model and the plan of a rank, of a job with these options."""

    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=af.Mesh(data=num_ranks), **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    spec = {name: af.TensorType(af.DType.INT32, (ROWS, SEQ)) for name in ("x", "y")}
    model = GPT(layers)
    return model, train.compile(model, spec, rank=rank)


def faces_plan(num_ranks: int, rank: int) -> Plan:
    """Return the plan of a rank that has some of the classes."""

    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(model=num_ranks))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    spec = {
        "x": af.TensorType(af.DType.FLOAT32, (FACES, FEATURES)),
        "y": af.TensorType(af.DType.INT32, (FACES,)),
    }
    layer = nn.Linear(FEATURES, CLASSES, bias=False, sbp={"model": af.split(0)})
    return train.compile(layer, spec, rank=rank)


def formula(model: nn.Module, num_ranks: int, rank: int, *, zero: bool) -> int:
    """Return the bytes of parameters and moments that a rank has, from the shapes alone."""
    total = 0
    for _, parameter in model.named_parameters():
        rows, *rest = parameter.type.shape
        if zero:
            rows = rows // num_ranks + (rank < rows % num_ranks)
        total += STATE * 4 * rows * prod(rest)
    return total


def of_state(plan: Plan) -> tuple[int, int]:
    """Return the bytes of a plan's parameters and moments, and how many more alignment may take."""
    variables = [v for v in plan.variables if v.role in ("parameter", "optimizer")]
    most = len(variables) * max([arena.alignment for arena in plan.arenas])
    return sum([m.parameter_bytes + m.optimizer_bytes for m in plan.memory]), most


def all_bytes(plan: Plan) -> int:
    """Return what all arenas of a plan take."""
    return sum([memory.peak_bytes for memory in plan.memory])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", default="1,2,3,4,8")
    counts = [int(n) for n in parser.parse_args().ranks.split(",")]
    print("| ranks | zero | rank | state by formula | in the plan | apart, at most | all of it |")
    print("|---|---|---|---|---|---|---|")
    for count in counts:
        for zero in (False, True):
            for rank in sorted({0, count - 1}):
                model, plan = gpt_plan(count, rank, zero=zero)
                expected, (planned, most) = formula(model, count, rank, zero=zero), of_state(plan)
                cells = [count, "yes" if zero else "no", rank, f"{expected:,}", f"{planned:,}"]
                cells += [f"{planned - expected:,}, {most:,}", f"{all_bytes(plan):,}"]
                print("|", " | ".join(map(str, cells)), "|", flush=True)
    print("\n| ranks | all of the plan | of one's | x ranks | largest exchanged | logits |")
    print("|---|---|---|---|---|---|")
    alone = 0
    for count in counts:
        plan = faces_plan(count, count - 1)
        size = all_bytes(plan)
        alone = alone or size
        sent = max(
            [m.whole.size_bytes for at in collective_groups(plan) for m in at.moves], default=0
        )
        cells = [count, f"{size:,}", f"{size / alone:.4f}", f"{count * size / alone:.3f}"]
        cells += [f"{sent:,}", f"{4 * FACES * CLASSES // count:,}"]
        print("|", " | ".join(map(str, cells)), "|", flush=True)
    print("\n| zero | batches a step | all saved | blocks run again |")
    print("|---|---|---|---|")
    for zero, every in product((False, True), (1, 4)):
        options = {"zero": zero, "accumulate": every, "layers": DEEP}
        plans = [gpt_plan(2, 0, recompute=how, **options)[1] for how in ("auto", "blocks")]
        cells = ["yes" if zero else "no", every, *[f"{all_bytes(plan):,}" for plan in plans]]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
