"""GPT-2, a LLaMA-style model or an LSTM, small and by character, learns to write Python.

    python examples/write_text.py [--model gpt2|llama|lstm] [--text FILE] [--steps 700]

Without a text it learns from the standard library.
"""

import argparse
import math

import picture
from models.gpt2 import GPT2
from models.llama import Llama
from models.lstm_lm import LSTMLanguageModel
from texts import VOCAB, continued, parted, read_text

import actorflow as af

SEQ = 64

MODELS = {
    "gpt2": lambda: GPT2(VOCAB, SEQ, width=128, layers=3, heads=4, dropout=0.0),
    "llama": lambda: Llama(VOCAB, width=128, layers=3, heads=4, kv_heads=2, hidden=344),
    "lstm": lambda: LSTMLanguageModel(VOCAB, width=64, hidden=256),
}


def score(model, batch):
    return {"loss": af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())}


evaluate = af.job(score, train=False)


@af.job(train=False)
def predict(model, batch):
    return {"probabilities": af.softmax(model(batch.x))}


def make_job(steps, rate, precision):
    """Return the job that trains as GPT-3 was: no decay but of matrices, a rate up and down."""
    schedule = af.optim.warmup(af.optim.cosine(rate, steps=steps, final=rate / 10), steps=50)
    recipe = af.optim.AdamW(schedule, betas=(0.9, 0.95), weight_decay=0.1, decay_only="matrices")
    return af.job(score, optimizer=recipe, clip_norm=1.0, precision=precision)


def main():
    parser = argparse.ArgumentParser(description="Train a model of text and let it write.")
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--length", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--png", default="runs/write_text.png", help="where the picture is written")
    args = parser.parse_args()

    known, unseen = parted(read_text(args.text))
    data = af.data.Tokens(known, seq=SEQ, batch=args.batch)
    held_out = af.data.Tokens(unseen, seq=SEQ, batch=args.batch)
    every = max(1, args.steps // 10)
    model, losses = MODELS[args.model](), []
    result = make_job(args.steps, args.rate, args.precision).fit(
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
