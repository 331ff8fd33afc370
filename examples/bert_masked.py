"""BERT, small and by character, learns to fill in what was masked in a text.

python examples/bert_masked.py [--text FILE] [--steps 2000]
"""

import argparse

import numpy as np
import picture
from models.bert import BertForMaskedLM
from texts import VOCAB, parted, read_text

import actorflow as af

SEQ, PICKED = 32, 5
MASK = VOCAB - 1  # a character that no text has


def masked(text, rng, batch):
    """Return windows of a text in which 5 of 32 characters are to be told, as BERT has it.

    Of ten that are picked eight are masked, one is another character, and one stays.
    """
    starts = rng.integers(0, len(text) - SEQ, batch)
    x = text[starts[:, None] + np.arange(SEQ)].astype(np.int32)
    picks = rng.permuted(np.tile(np.arange(SEQ), (batch, 1)), axis=1)[:, :PICKED]
    places = (picks + SEQ * np.arange(batch)[:, None]).reshape(-1).astype(np.int32)
    answers = x.reshape(-1)[places]
    chance = rng.random(len(places))
    others = rng.integers(0, VOCAB, len(places))
    shown = np.where(chance < 0.8, MASK, np.where(chance < 0.9, others, answers))
    x.reshape(-1)[places] = shown
    return {"x": x, "places": places, "y": answers}


def batches(text, batch, seed=0):
    rng = np.random.default_rng(seed)
    while True:
        yield masked(text, rng, batch)


def score(model, batch):
    found = model(batch.x, places=batch.places)
    hits = found.argmax(1) == batch.y.to("int64")
    return {"loss": af.cross_entropy(found, batch.y), "accuracy": hits.to("float32").mean()}


evaluate = af.job(score, train=False)


@af.job(train=False)
def fill(model, batch):
    return {"filled": model(batch.x).argmax(-1)}


def shown(codes):
    """Return codes as text on one line; what is masked is a block."""
    return "".join("█" if c == MASK else chr(c) if 32 <= c < MASK else "·" for c in codes)


def main():
    parser = argparse.ArgumentParser(description="Train a small BERT and let it fill in.")
    parser.add_argument("--text", help="a text file; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--png", default="runs/bert_masked.png", help="where the picture is written"
    )
    args = parser.parse_args()

    rate = af.optim.warmup(af.optim.linear(3e-3, steps=args.steps), steps=args.steps // 10)
    recipe = af.optim.AdamW(rate, weight_decay=0.01, decay_only="matrices")
    train = af.job(score, optimizer=recipe, clip_norm=1.0)

    known, unseen = parted(read_text(args.text))
    spec = af.data.spec_of(masked(known, np.random.default_rng(0), args.batch))
    data = af.data.from_iterable(lambda: batches(known, args.batch), spec)
    model, losses = BertForMaskedLM(VOCAB, SEQ, width=128, layers=2, heads=4, dropout=0.0), []
    train.fit(model, data, steps=args.steps, on_step=lambda _, out: losses.append(out["loss"]))

    test = af.data.from_iterable(lambda: batches(unseen, args.batch, seed=1), spec)
    hits = np.mean([out["accuracy"] for out in evaluate.stream(model, test, steps=10)])
    print(f"unseen text: {hits:.1%} of what was masked is filled in right")
    picture.write_png(args.png, picture.curves({"loss": losses}))
    print(f"the loss by step: {args.png}\n{'-' * 72}")

    batch = masked(unseen, np.random.default_rng(2), 5)
    filled = fill.step(model, {"x": batch["x"]})["filled"]
    for x, y in zip(batch["x"], filled, strict=True):
        print(f"{shown(x)}\n{shown(np.where(x == MASK, y, x))}\n")


if __name__ == "__main__":
    main()
