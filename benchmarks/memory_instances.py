"""Instances of the placement problem: public files, and graph-like ones of any size.

The generators write what training graphs look like to a memory planner. A *cell* is a small random
graph of ops with branches and skips, as in networks found by architecture search; cells follow each
other, and at every fourth the resolution drops. Backward ops run in reverse order, read the saved
activations and produce gradients, which live until the last contribution is used. A pipeline stage
interleaves forward and backward of several micro-batches (one forward, one backward, after a
warm-up). Sizes are multiples of 512 bytes.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from memory.offsets import plan_offsets


@dataclass(frozen=True, slots=True)
class Buffers:
    """The columns of an instance; intervals [lower, upper) are half-open."""

    name: str
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Op:
    """A forward op: which ops it reads, the bytes of its output and of its scratch memory."""

    inputs: tuple[int, ...]
    size: int
    scratch: int
    weight: int


def rows(folder: Path, sizes: tuple[int, ...] = (1_000, 10_000, 100_000)) -> list[dict[str, Any]]:
    """Plan every public instance in `folder` and graph-like ones of about `sizes` buffers."""
    return [_row(instance) for instance in (*public(folder), *graph_like(sizes))]


def _row(instance: Buffers) -> dict[str, Any]:
    begin = time.perf_counter()
    plan = plan_offsets(instance.lower, instance.upper, instance.size, alignment=1)
    seconds = time.perf_counter() - begin
    return {
        "name": instance.name,
        "n": len(instance.size),
        "lower_bound": plan.lower_bound_bytes,
        "peak": plan.peak_bytes,
        "gap": plan.gap,
        "certificate": plan.certificate,
        "algorithm": plan.algorithm,
        "nodes": plan.nodes,
        "seconds": seconds,
    }


def public(folder: Path) -> Iterator[Buffers]:
    """Read every instance file of a folder, by name; see its README.md for the format."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            table = list(csv.DictReader(file))
        lower, upper, size = (tuple(int(r[c]) for r in table) for c in ("lower", "upper", "size"))
        yield Buffers(path.name.removesuffix(".csv"), lower, upper, size)


def graph_like(sizes: tuple[int, ...]) -> Iterator[Buffers]:
    """Make a training graph and a pipeline stage of about each number of buffers."""
    for n in sizes:
        yield training(f"train_{n}", _network(n // 5, Random(n)))
        num_batches = max(4, round((n / 100) ** 0.5))
        network = _network(n // (4 * num_batches), Random(n + 1))
        yield pipeline(f"pipe1f1b_{n}", network, num_batches, warm_up=3)


def hard_kinds() -> Iterator[Buffers]:
    """Make perfect packings, and pipeline stages of several lengths, over some seeds each."""
    for num_buffers in (100, 200, 400):
        for seed in range(100, 105):
            yield perfect(num_buffers, seed)
    stages = ((None, 2), (None, 3), (None, 6), (16, 4), (64, 8))
    for n, shapes in ((1_000, stages), (3_000, stages), (10_000, stages), (100_000, stages[1::3])):
        for seed in (100, 101):
            for batches, warm_up in shapes:
                num_batches = batches or max(4, round((n / 100) ** 0.5))
                network = _network(n // (4 * num_batches), Random(seed))
                name = f"pipe1f1b_{n}_b{num_batches}_w{warm_up}_s{seed}"
                yield pipeline(name, network, num_batches, warm_up)


def perfect(num_buffers: int, seed: int) -> Buffers:
    """Return a perfect packing of so many buffers."""
    rows, _ = cut_rectangle(num_buffers, Random(seed))
    lower, upper, size = zip(*rows, strict=True)
    return Buffers(f"perfect_{num_buffers}_s{seed}", lower, upper, size)


def cut_rectangle(num_buffers: int, rng: Random) -> tuple[list[tuple[int, int, int]], int]:
    """Cut a rectangle of time and bytes into buffers, some as pinwheels of five: they fill it.

    Return their rows (lower, upper, size) and the bytes of the rectangle. They are fewer where its
    parts cannot be cut any more.
    """
    length, height = num_buffers // 2, 1 << 12
    parts = [(0, length, 0, height)]
    for _ in range(50 * num_buffers):
        if len(parts) >= num_buffers:
            break
        i = rng.choices(range(len(parts)), [(b - a) * (d - c) for a, b, c, d in parts])[0]
        a, b, c, d = parts[i]
        if rng.random() < 0.35 and b - a >= 3 and d - c >= 3:
            x1, x2 = sorted(rng.sample(range(a + 1, b), 2))
            y1, y2 = sorted(rng.sample(range(c + 1, d), 2))
            parts[i : i + 1] = [
                (a, x2, c, y1), (x2, b, c, y2), (x1, b, y2, d), (a, x1, y1, d), (x1, x2, y1, y2),
            ]  # fmt: skip
        elif b - a > 1 and (rng.random() < 0.5 or d - c < 2):
            x = rng.randrange(a + 1, b)
            parts[i : i + 1] = [(a, x, c, d), (x, b, c, d)]
        elif d - c > 1:
            y = rng.randrange(c + 1, d)
            parts[i : i + 1] = [(a, b, c, y), (a, b, y, d)]
    rng.shuffle(parts)
    return [(a, b, d - c) for a, b, c, d in parts], height


def training(name: str, network: list[_Op]) -> Buffers:
    """One forward and one backward pass over a network."""
    return pipeline(name, network, 1, 1)


def pipeline(name: str, network: list[_Op], num_batches: int, warm_up: int) -> Buffers:
    """A pipeline stage: `warm_up` forwards, then a backward and a forward in turns."""
    phases = [("F", b) for b in range(min(warm_up, num_batches))]
    for b in range(num_batches):
        phases.append(("B", b))
        if warm_up + b < num_batches:
            phases.append(("F", warm_up + b))
    begin = {phase: place * len(network) for place, phase in enumerate(phases)}
    spans: list[tuple[int, int, int]] = []
    for b in range(num_batches):
        spans += _spans_of_batch(network, begin["F", b], begin["B", b])
    lower, upper, size = zip(*spans, strict=True)
    return Buffers(name, lower, upper, size)


def _spans_of_batch(network: list[_Op], forward: int, backward: int) -> list[tuple[int, int, int]]:
    """Return (lower, upper, size) of all buffers of one micro-batch.

    Op i runs forward at step forward + i, backward at step backward + len(network) - 1 - i.
    """
    last = len(network) - 1
    readers: list[list[int]] = [[] for _ in network]
    for i, op in enumerate(network):
        for j in op.inputs:
            readers[j].append(i)
    spans = []
    for i, op in enumerate(network):
        back = backward + last - i
        # Every third op keeps its output for its own backward, every op its inputs' outputs.
        is_saved = i % 3 == 0 or any([r % 2 == 0 for r in readers[i]])
        used_last = max([forward + r for r in readers[i]], default=forward + i)
        until = backward + last - min(readers[i], default=i) if is_saved else used_last
        spans.append((forward + i, (max(until, back) if is_saved else until) + 1, op.size))
        grad_from = backward + last - max(readers[i], default=i)
        spans.append((grad_from, back + 1, op.size))
        if op.scratch:
            spans.append((forward + i, forward + i + 1, op.scratch))
            spans.append((back, back + 1, 2 * op.scratch))
        spans.append((back, back + 1, op.weight))
    return spans


def _network(num_ops: int, rng: Random) -> list[_Op]:
    """Make cells of eight ops; each reads one or two ops of its cell or of the two before it."""
    ops: list[_Op] = []
    outputs = [0, 0]
    while len(ops) < num_ops:
        depth = (len(ops) // 8 // 4) % 5
        unit = 512 * (1 << (12 - 2 * depth))
        channels = 4 << depth
        local = list(outputs)
        for _ in range(8):
            inputs = tuple(sorted(rng.sample(local, k=min(len(local), rng.choice((1, 1, 2))))))
            if not ops:
                inputs = ()
            share = rng.choice((1, 1, 2, 3))
            size = unit * channels * share // 4
            scratch = unit * rng.randrange(1, 6) if rng.random() < 0.4 else 0
            weight = 512 * channels * channels * rng.randrange(1, 5)
            local.append(len(ops))
            ops.append(_Op(inputs, size, scratch, weight))
        outputs = [outputs[-1], len(ops) - 1]
    return ops
