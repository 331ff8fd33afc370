"""A GPT on a thousand ranks that are not there: classes compiled, proven, simulated.

    python benchmarks/bench_classes.py [--layers 48] [--mesh 8,25,5] [--width 1600]
        [--vocabulary 50260] [--per-host K]

GPT-2 XL with a vocabulary that the ranks can share, in stages of as many layers each, a row of
1,024 tokens for each rank along "data", heads, hidden columns, table and classes in parts along
"model"; 8 batches a step, AdamW, the norm of gradients bounded. Prints the seconds of each part:
layouts, classes of ranks and their plans; the proof of all together; five steps of all on virtual
time, by the plans' own estimates. With --per-host ranks are on hosts that are joined as
ACTORFLOW_LINK says, and plans are made for these.
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
from actorflow.environment.settings import Settings
from actorflow.options.run_spec import PlanOptions
from actors.simulation.costs import Network, Wire
from actors.simulation.ranks import simulate_ranks
from compiler.contract.placement import INSIDE_A_HOST, Hosts, MeshLink, on_hosts
from compiler.verify.cross_rank import verify_ranks

SEQ = 1024
SHARED = {"model": af.split(0)}


class GPT(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary], in stages."""

    def __init__(self, layers: int, width: int, stages: int, vocabulary: int) -> None:
        self.stages = stages
        self.table = nn.Embedding(vocabulary, width, sbp=SHARED)
        self.places = nn.Embedding(SEQ, width)
        self.blocks = [
            nn.TransformerBlock(width, heads=width // 64, causal=True, dropout=0.1, sbp=SHARED)
            for _ in range(layers)
        ]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False, sbp=SHARED)

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
    parser.add_argument("--vocabulary", type=int, default=50_260)
    parser.add_argument("--per-host", type=int, default=0, help="0: all on one")
    args = parser.parse_args()
    stage, data, model = map(int, args.mesh.split(","))
    mesh = af.Mesh(stage=stage, data=data, model=model)

    @af.job(optimizer=af.optim.AdamW(1e-4), mesh=mesh, accumulate=8, clip_norm=1.0)
    def train(gpt, batch):
        return af.cross_entropy(gpt(batch.x).flatten(0, -2), batch.y.flatten())

    spec = {name: af.TensorType(af.DType.INT32, (data, SEQ)) for name in ("x", "y")}
    begun = now()
    link = Settings.from_env(os.environ).link if args.per_host else MeshLink()
    hosts = Hosts((args.per_host or mesh.num_ranks,), INSIDE_A_HOST, link)
    ranks_asked = on_hosts(mesh, hosts)
    gpt = GPT(args.layers, args.width, stage, args.vocabulary)
    job_spec = train._spec(gpt, spec, PlanOptions(), ranks_asked)
    laps = [("traced", now())]
    ranks = plans_of_classes(job_spec)
    laps.append((f"{len(ranks.plans)} classes of {len(ranks.class_of)} ranks compiled", now()))
    verify_ranks(ranks)
    laps.append(("proven together", now()))
    wires = [Wire(one.bytes_per_ns, one.latency_ns) for one in (link, INSIDE_A_HOST)]
    network = Network(wires[0], "hierarchical", args.per_host or 1, wires[1])
    simulation = simulate_ranks(ranks, 5, network=network)
    laps.append((f"5 steps of 8 batches simulated, {simulation.num_kinds} kinds of ranks", now()))
    where = ranks.plans[0].hosts or "one host"
    print(f"mesh {mesh}, {where}: a step takes {simulation.step_ns / 1e9:.1f} s\n")
    print("| part | s |\n|---|---|")
    for (_, before), (what, after) in zip([("", begun), *laps], laps, strict=False):
        print(f"| {what} | {after - before:.1f} |")
    print(f"| all | {laps[-1][1] - begun:.1f} |")


def now() -> float:
    return time.perf_counter()


if __name__ == "__main__":
    main()
