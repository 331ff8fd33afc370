"""GPT-2, small and by character, learns to write Python from the standard library, or any text.

python examples/gpt2_text.py [--text FILE] [--steps 700] [--png gpt2_text.png]
"""

import argparse
import math

import picture
from models.gpt2 import GPT2
from texts import VOCAB, continued, parted, read_text

import actorflow as af

SEQ = 64


def score(model, batch):
    return {"loss": af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())}


evaluate = af.job(score, train=False)


@af.job(train=False)
def predict(model, batch):
    return {"probabilities": af.softmax(model(batch.x))}


def main():
    parser = argparse.ArgumentParser(description="Train a small GPT-2 and let it write.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--png", default="gpt2_text.png", help="where the picture is written")
    args = parser.parse_args()

    # GPT-3's recipe: no decay but on matrices, gradients clipped, a rate that climbs and falls.
    rate = af.optim.warmup(af.optim.cosine(2e-3, steps=args.steps, final=2e-4), steps=50)
    recipe = af.optim.AdamW(rate, betas=(0.9, 0.95), weight_decay=0.1, decay_only="matrices")
    train = af.job(score, optimizer=recipe, clip_norm=1.0)

    known, unseen = parted(read_text(args.text))
    data = af.data.Tokens(known, seq=SEQ, batch=args.batch)
    held_out = af.data.Tokens(unseen, seq=SEQ, batch=args.batch)
    every = max(1, args.steps // 10)
    model, losses = GPT2(VOCAB, SEQ, width=128, layers=3, heads=4, dropout=0.0), []
    result = train.fit(
        model, data, steps=args.steps, on_step=lambda step, out: losses.append(out["loss"]),
        evaluation=af.Evaluation(evaluate, held_out, every=every, batches=8),
    )  # fmt: skip

    bits = result.evaluations[-1][1]["loss"] / math.log(2)
    print(f"unseen text: {bits:.2f} bits per character, where 7 would be a guess")
    picture.write_png(args.png, picture.curves({"loss": losses}))
    print(f"the loss by step: {args.png}\n{'-' * 72}")
    print(continued(model, predict, "def ", seq=SEQ, length=args.length))


if __name__ == "__main__":
    main()
