"""A LLaMA-style model, small and by character, in bfloat16, learns to write Python.

python examples/llama_text.py [--text FILE] [--steps 700] [--png llama_text.png]
"""

import argparse
import math

import picture
from models.llama import Llama
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
    parser = argparse.ArgumentParser(description="Train a small LLaMA and let it write.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--png", default="llama_text.png", help="where the picture is written")
    args = parser.parse_args()

    up, down = args.steps // 20, max(1, args.steps // 5)
    rate = af.optim.wsd(2e-3, warmup=up, stable=max(0, args.steps - up - down), decay=down)
    recipe = af.optim.AdamW(rate, betas=(0.9, 0.95), weight_decay=0.1, decay_only="matrices")
    train = af.job(score, optimizer=recipe, clip_norm=1.0, precision=args.precision)

    known, unseen = parted(read_text(args.text))
    data = af.data.Tokens(known, seq=SEQ, batch=args.batch)
    held_out = af.data.Tokens(unseen, seq=SEQ, batch=args.batch)
    every = max(1, args.steps // 10)
    model, losses = Llama(VOCAB, width=128, layers=3, heads=4, kv_heads=2, hidden=344), []
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
