"""A character model whose ranks share batches, heads, hidden columns and characters.

actorflow launch -n 4 examples/shared_text.py [--model 2] [--steps 300] [--png FILE]

Started with python it is the same model on one rank.
"""

import argparse
import os

import picture
from texts import VOCAB, read_text

import actorflow as af
from actorflow import nn

SEQ, SHARED = 64, {"model": af.split(0)}


class SharedLM(nn.Module):
    """Tables by rows, blocks by heads and hidden columns, scores by characters."""

    def __init__(self, d=128):
        self.emb, self.pos = nn.Embedding(VOCAB, d, sbp=SHARED), nn.Embedding(SEQ, d)
        blocks = [nn.TransformerBlock(d, heads=4, causal=True, sbp=SHARED) for _ in range(2)]
        self.blocks, self.norm = blocks, nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCAB, sbp=SHARED)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def training(mesh, zero):
    """Return the job on a mesh: nothing else about it is about ranks."""

    @af.job(optimizer=af.optim.AdamW(1e-3), mesh=mesh, zero=zero)
    def train(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())

    return train


def main():
    parser = argparse.ArgumentParser(description="Train a character model on many ranks.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="rows of all ranks together")
    parser.add_argument("--model", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--zero", action="store_true", help="share parameters and their state too")
    parser.add_argument("--png", default="runs/shared_text.png", help="where the loss is drawn")
    args = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % args.model:
        parser.error(f"--model: {ranks} ranks are no multiple of {args.model}")
    mesh = af.Mesh(data=ranks // args.model, model=args.model)
    data, losses = af.data.Tokens(read_text(args.text), seq=SEQ, batch=args.batch), []
    result = training(mesh, args.zero).fit(
        SharedLM(),
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
