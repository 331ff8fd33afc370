"""A character GPT on the sources of Python's own standard library, or on any text.

    python examples/char_gpt.py [--text FILE] [--steps 1300] [--checkpoint runs/demo]

Stop it with ^C or kill -9 at any moment and start it again: it continues, bit-exact.
"""

import argparse
import pathlib
import sys

from texts import VOCAB, continued, read_text

import actorflow as af
from actorflow import nn

SEQ, BATCH = 64, 32


class CharLM(nn.Module):
    def __init__(self, d=128):
        self.emb, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(SEQ, d)
        self.blocks = [nn.TransformerBlock(d, heads=4, causal=True) for _ in range(2)]
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


@af.job(optimizer=af.optim.AdamW(1e-3))
def train(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())


@af.job(train=False)
def predict(model, batch):
    return {"probabilities": af.softmax(model(batch.x))}


def main():
    parser = argparse.ArgumentParser(description="Train a character GPT and let it write.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=1300, help="total steps (default 1300)")
    parser.add_argument("--checkpoint", default="runs/demo", help="directory of the run")
    args = parser.parse_args()
    if args.text is not None and not pathlib.Path(args.text).is_file():
        parser.error(f"--text: there is no file {args.text}")

    data = af.data.Tokens(read_text(args.text), seq=SEQ, batch=BATCH, seed=0)
    model = CharLM()
    result = train.fit(model, data, steps=args.steps, checkpoint=args.checkpoint)
    if result.mean_loss is not None:
        print(f"mean loss of the last {result.num_averaged} steps: {result.mean_loss:.4f}")
    print("-" * 72)
    print(continued(model, predict, "def ", seq=SEQ, length=400))


if __name__ == "__main__":
    try:
        main()
    except af.ActorflowError as error:
        sys.exit(f"char_gpt: {error}")
