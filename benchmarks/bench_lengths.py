"""What rows of different lengths cost: padded to the longest, or packed; and the mask of segments.

    python benchmarks/bench_lengths.py [--rows 512] [--length 256] [--steps 30]

Rows have lengths of a log-normal distribution. Each way trains the same GPT on batches of as many
places; a line has the share of places that are tokens, the median step, and tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import actorflow as af
from actorflow import nn

WORDS, WIDTH, HEADS, BATCH = 1024, 128, 4, 8


class GPT(nn.Module):
    """Two blocks on ids, positions and, perhaps, segments."""

    def __init__(self, length):
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = [nn.TransformerBlock(WIDTH, heads=HEADS, causal=True) for _ in range(2)]
        self.out = nn.Linear(WIDTH, WORDS)

    def __call__(self, ids, positions, segments=None):
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x, segments)
        return self.out(x)


def loss_of(logits, labels):
    return af.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="tokens"
    )


@af.job(optimizer=af.optim.AdamW(1e-3))
def packed(model, batch):
    """Train on packed rows."""
    return loss_of(model(batch.ids, batch.positions, batch.segments), batch.labels)


@af.job(optimizer=af.optim.AdamW(1e-3))
def unmasked(model, batch):
    """Train on the same, where rows see those before them."""
    return loss_of(model(batch.ids, batch.positions), batch.labels)


@af.job(optimizer=af.optim.AdamW(1e-3))
def padded(model, batch):
    """Train on one row in each line."""
    return loss_of(model(batch.ids, af.arange(batch.ids.shape[1])), batch.labels)


def measure(job, source, length, steps):
    """Return the share of places that are labels, and the median seconds of a step."""
    model, shares, seconds = GPT(length), [], []
    for number in range(steps + 3):
        batch = next(source)
        shares.append(float((batch["labels"] != -100).mean()))
        start = time.perf_counter()
        job.step(model, batch)
        seconds.append(time.perf_counter() - start if number >= 3 else 0.0)
    job.close(model)
    return statistics.fmean(shares), statistics.median(seconds[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(np.log(options.length / 6), 0.7, options.rows), 2, options.length)
    rows = [rng.integers(1, WORDS, int(n)).astype(np.int32) for n in sizes]
    nexts = [np.append(row[1:], -100).astype(np.int32) for row in rows]
    sources = {
        "padded": af.data.bucket(
            {"ids": rows, "labels": nexts}, edges=(options.length,), batch=BATCH,
            pad={"labels": -100},
        ),
        "packed": af.data.pack(rows, length=options.length, batch=BATCH),
        "unmasked": af.data.pack(rows, length=options.length, batch=BATCH),
    }  # fmt: skip
    for job, (name, source) in zip((padded, packed, unmasked), sources.items(), strict=True):
        share, seconds = measure(job, source, options.length, options.steps)
        places = BATCH * options.length
        print(
            f"{name:9} {share:5.1%} labels, {seconds * 1e3:7.2f} ms a step,"
            f" {places * share / seconds:9,.0f} labels/s"
        )


if __name__ == "__main__":
    main()
