"""An LSTM learns to write Python, character by character.

python examples/lstm_text.py [--text FILE] [--steps 600] [--png lstm_text.png]
"""

import argparse
import math

import picture
from models.lstm_lm import LSTMLanguageModel
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
    parser = argparse.ArgumentParser(description="Train an LSTM and let it write.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=300, help="characters to write at the end")
    parser.add_argument("--png", default="lstm_text.png", help="where the picture is written")
    args = parser.parse_args()

    rate = af.optim.cosine(4e-3, steps=args.steps)
    train = af.job(score, optimizer=af.optim.Adam(rate), clip_norm=0.25)

    known, unseen = parted(read_text(args.text))
    data = af.data.Tokens(known, seq=SEQ, batch=args.batch)
    held_out = af.data.Tokens(unseen, seq=SEQ, batch=args.batch)
    every = max(1, args.steps // 10)
    model, losses = LSTMLanguageModel(VOCAB, width=64, hidden=256), []
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
