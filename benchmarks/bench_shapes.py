"""What batches of several shapes cost: a switch between plans, and buckets of lengths in `stream`.

    python benchmarks/bench_shapes.py [--rounds 5] [--steps 30] [--cpu]
    actorflow launch -n 2 benchmarks/bench_shapes.py

First an MLP is stepped with batches of three sizes: each size by itself, and in turn. The mark is
1.2 times a step: a switch may take a fifth of it. Then an encoder and decoder with attention is
trained on buckets of three lengths, all batches of as many places for tokens, and on batches of
those that are padded to the longest. The mark is 1.15 times the time per place of the padded ones.
Each figure is the best of some rounds that alternate: another load on the machine only ever adds.
With `--cpu` times are processor times of all threads, which say less of waits and more of work.
Ranks that are launched share each batch, and the first one prints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

import actorflow as af
from actorflow import nn
from actorflow.data import from_iterable, spec_of

SIZES = (8, 16, 24)
LENGTHS = (16, 32, 64)
PLACES, WIDTH, WORDS = 2048, 128, 512
SWITCH_MARK, BUCKET_MARK = 1.2, 1.15
CLOCK = time.process_time if "--cpu" in sys.argv else time.perf_counter
MESH = af.Mesh(data=-1) if "RANK" in os.environ else None


class Layers(nn.Module):
    """Eight square layers."""

    def __init__(self) -> None:
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

    def __call__(self, x: af.Tensor) -> af.Tensor:
        return self.layers(x)


class Seq2Seq(nn.Module):
    """An encoder and a decoder of two layers each over one vocabulary."""

    def __init__(self) -> None:
        self.words = nn.Embedding(WORDS, WIDTH)
        encoder = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        decoder = nn.TransformerDecoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def __call__(self, source: af.Tensor, target: af.Tensor) -> af.Tensor:
        memory = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target), memory, tgt_is_causal=True))


@af.job(optimizer=af.optim.Adam(1e-3), mesh=MESH)
def train_layers(model: Layers, batch: af.Batch) -> af.Tensor:
    return af.square(model(batch.x)).mean()


@af.job(train=False, mesh=MESH)
def see_layers(model: Layers, batch: af.Batch) -> af.Tensor:
    return af.square(model(batch.x)).mean()


@af.job(optimizer=af.optim.Adam(1e-3), mesh=MESH)
def translate(model: Seq2Seq, batch: af.Batch) -> af.Tensor:
    logits = model(batch.source, batch.target)
    return af.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def step_ms(step: Callable[[int], object], order: Sequence[int]) -> float:
    """Return the mean time of the steps of some sizes."""
    began = CLOCK()
    for size in order:
        step(size)
    return (CLOCK() - began) / len(order) * 1e3


def measure_switches(job: af.Job, rounds: int, steps: int) -> tuple[float, float]:
    """Return milliseconds a step, of each size by itself and of the sizes in turn."""
    model = Layers()
    batches = {n: {"x": np.ones((n, 256), np.float32)} for n in SIZES}
    orders = [*[[n] * steps for n in SIZES], SIZES * steps]
    rounds_ms = [
        [step_ms(lambda n: job.step(model, batches[n]), order) for order in orders]
        for _ in range(rounds + 1)  # the first one compiles
    ]
    *alone, in_turn = [min(column) for column in zip(*rounds_ms[1:], strict=True)]
    job.close(model)
    return sum(alone) / len(alone), in_turn


def batch_of(length: int, seed: int) -> dict[str, np.ndarray]:
    """Return a batch of random words of one length."""
    rng = np.random.default_rng(seed)
    names = ("source", "target", "labels")
    return {n: rng.integers(0, WORDS, (PLACES // length, length), np.int32) for n in names}


def place_us(model: Seq2Seq, lengths: Sequence[int], steps: int) -> float:
    """Return microseconds per place of a training on batches of lengths in any order."""
    order = np.random.default_rng(0).choice(lengths, steps + 3)

    def batches() -> Iterator[dict[str, np.ndarray]]:
        return iter([batch_of(int(length), seed) for seed, length in enumerate(order)])

    source = from_iterable(batches, [spec_of(batch_of(length, 0)) for length in lengths])
    times = [CLOCK() for _ in translate.stream(model, source)]
    return (times[-1] - times[2]) / steps / PLACES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
    print(f"{'steps of three sizes':<24} {'alone ms':>9} {'in turn ms':>11} {'ratio':>6}")
    for job in (train_layers, see_layers):
        alone, in_turn = measure_switches(job, options.rounds, options.steps)
        ratio = in_turn / alone
        print(f"{job.name:<24} {alone:>9.3f} {in_turn:>11.3f} {ratio:>6.2f} (mark {SWITCH_MARK})")
    model, rows = Seq2Seq(), []
    for round_ in range(options.rounds + 1):
        row = [place_us(model, lengths, options.steps) for lengths in (LENGTHS[-1:], LENGTHS)]
        if round_:
            rows.append(row)
    padded, buckets = (min(column) for column in zip(*rows, strict=True))
    print(f"\n{'places for tokens':<24} {'us each':>9}")
    print(f"{'padded to 64':<24} {padded:>9.3f}")
    print(f"{'buckets of 16, 32, 64':<24} {buckets:>9.3f}")
    print(f"ratio {buckets / padded:.2f} (mark {BUCKET_MARK})")


if __name__ == "__main__":
    main()
