"""A character model on many ranks: which share batches, layers, stages and the optimizer's state.

actorflow launch -n 2 examples/ranks.py [--model 2 | --stage 2] [--zero] [--steps 300] [--png FILE]

Ranks that are left over have other rows of each batch. Started with python it is the same model on
one rank, and comes to the same losses but for the order of sums.
"""

import argparse
import os

import picture
from texts import VOCAB, read_text

import actorflow as af
from actorflow import nn

SEQ, BLOCKS, SHARED = 64, 2, {"model": af.split(0)}


class SharedLM(nn.Module):
    """Tables by rows, blocks by heads and hidden columns, scores by characters; a block a stage."""

    def __init__(self, num_stages, d=128):
        self.num_stages = num_stages
        self.emb, self.pos = nn.Embedding(VOCAB, d, sbp=SHARED), nn.Embedding(SEQ, d)
        block = {"heads": 4, "causal": True, "sbp": SHARED}
        self.blocks = [nn.TransformerBlock(d, **block) for _ in range(BLOCKS)]
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, sbp=SHARED)

    def __call__(self, x):
        with af.stage(0):
            h = self.emb(x) + self.pos.weight
        for number, block in enumerate(self.blocks):
            with af.stage(number * self.num_stages // BLOCKS):
                h = block(h)
        return self.head(self.norm(h))  # on the last stage, which it reads something of


def training(mesh, **options):
    """Return the job on a mesh: nothing else about it is about ranks."""

    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=mesh, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())

    return train


def main():
    parser = argparse.ArgumentParser(description="Train a character model on many ranks.")
    add = parser.add_argument
    add("--text", help="a text file; default: Python's standard library")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=32, help="rows of all ranks together")
    add("--accumulate", type=int, default=1, help="batches of a step, which fill a pipeline")
    add("--model", type=int, default=1, help="ranks that share each layer")
    add("--stage", type=int, default=1, choices=(1, BLOCKS), help="ranks that share the blocks")
    add("--zero", action="store_true", help="share parameters and their state too")
    add("--png", default="runs/ranks.png", help="where the loss is drawn")
    args = parser.parse_args()

    ranks, shared = int(os.environ.get("WORLD_SIZE", "1")), args.model * args.stage
    if ranks % shared:
        parser.error(f"--model and --stage: {ranks} ranks are no multiple of {shared}")
    mesh = af.Mesh(stage=args.stage, data=ranks // shared, model=args.model)
    data, losses = af.data.Tokens(read_text(args.text), seq=SEQ, batch=args.batch), []
    result = training(mesh, zero=args.zero, accumulate=args.accumulate).fit(
        SharedLM(args.stage),
        data,
        steps=args.steps,
        on_step=lambda step, outputs: losses.append(outputs["loss"]),
    )
    print(f"loss of step {result.last_step} on {mesh}: {losses[-1]:.4f}")
    if os.environ.get("RANK", "0") == "0":
        picture.write_png(args.png, picture.curves({"loss": losses}))
        print(f"the loss by step: {args.png}")


if __name__ == "__main__":
    main()
