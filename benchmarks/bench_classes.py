"""A GPT on a thousand ranks that are not there: classes compiled, proven, simulated.

    python benchmarks/bench_classes.py [--layers 48] [--mesh 8,25,5] [--width 1600]

GPT-2 XL with a vocabulary that the ranks can share, in stages of as many layers each, a row of
1,024 tokens for each rank along "data", heads, hidden columns, table and classes in parts along
"model"; 8 batches a step, AdamW, the norm of gradients bounded. Prints the seconds of each part:
layouts, classes of ranks and their plans; the proof of all together; five steps of all on virtual
time, by the plans' own estimates.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault(
    "ACTORFLOW_NATIVE", "0"
)  # nothing of it runs, so nothing is built or measured
os.environ.setdefault("ACTORFLOW_CACHE", "off")

import actorflow as af
from actorflow import nn
from actorflow.distributed.agreed_plan import plans_of_classes
from actorflow.options.run_spec import PlanOptions
from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import simulate_ranks
from compiler.verify.cross_rank import verify_ranks

SEQ, VOCABULARY = 1024, 50_260
SHARED = {"model": af.split(0)}


class GPT(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary], in stages."""

    def __init__(self, layers: int, width: int, stages: int) -> None:
        self.stages = stages
        self.table = nn.Embedding(VOCABULARY, width, sbp=SHARED)
        self.places = nn.Embedding(SEQ, width)
        self.blocks = [
            nn.TransformerBlock(width, heads=width // 64, causal=True, dropout=0.1, sbp=SHARED)
            for _ in range(layers)
        ]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False, sbp=SHARED)

    def __call__(self, x: af.Tensor) -> af.Tensor:
        with af.stage(0):
            h = self.table(x) + self.places.weight
        for number, block in enumerate(self.blocks):
            with af.stage(number * self.stages // len(self.blocks)):
                h = block(h)
        return self.head(self.norm(h))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600, help="a multiple of 64")
    parser.add_argument("--mesh", default="8,25,5", help="ranks by stage, data and model")
    args = parser.parse_args()
    stage, data, model = map(int, args.mesh.split(","))
    mesh = af.Mesh(stage=stage, data=data, model=model)

    @af.job(optimizer=af.optim.AdamW(1e-4), mesh=mesh, accumulate=8, clip_norm=1.0)
    def train(gpt, batch):
        return af.cross_entropy(gpt(batch.x).flatten(0, -2), batch.y.flatten())

    spec = {name: af.TensorType(af.DType.INT32, (data, SEQ)) for name in ("x", "y")}
    begun = now()
    job_spec = train._spec(GPT(args.layers, args.width, stage), spec, PlanOptions(), train.ranks(0))
    laps = [("traced", now())]
    ranks = plans_of_classes(job_spec)
    laps.append((f"{len(ranks.plans)} classes of {len(ranks.class_of)} ranks compiled", now()))
    verify_ranks(ranks)
    laps.append(("proven together", now()))
    simulation = simulate_ranks(ranks, 5, network=Network(Wire(12.5, 5_000.0)))
    laps.append((f"5 steps of 8 batches simulated, {simulation.num_kinds} kinds of ranks", now()))
    print("| part | s |\n|---|---|")
    for (_, before), (what, after) in zip([("", begun), *laps], laps, strict=False):
        print(f"| {what} | {after - before:.1f} |")
    print(f"| all | {laps[-1][1] - begun:.1f} |")


def now() -> float:
    return time.perf_counter()


if __name__ == "__main__":
    main()
