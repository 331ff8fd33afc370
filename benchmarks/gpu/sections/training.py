"""Steps of each job against the host; resumed runs and launches one by one have the same bits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from engines.actorflow_models import FAMILIES, Rounds, job_of
from rows.row import Row

from gpu.jobs import proven_rows
from gpu.opened import GPU
from gpu.section import Findings, Place

STEPS, FEW = 20, 4
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
"""How far losses may lie apart, by the largest of the host's: one that has come near 0 keeps what
was rounded in the others."""

_WHOLE = ("tiny", "small-gpt2", "small-bert", "tiny-gpt2")
"""Rows that are run launch by launch, and resumed, as well."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run left: losses by step, and the parameters as a hash."""

    losses: tuple[float, ...]
    bits: str


def run(found: Findings, place: Place) -> None:
    steps = FEW if place.is_emulated else STEPS
    rows = proven_rows(is_tiny=place.is_emulated)
    # The host is the slower one by far: it has all rows at once, a few cores each.
    os.environ["OPENBLAS_NUM_THREADS"] = "2"
    workers = max(1, min(len(rows), (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        hosts = [pool.submit(_on_host, place.is_emulated, n, steps) for n in range(len(rows))]
        pairs = {
            n: pool.submit(_on_host, place.is_emulated, n, steps, accumulate=2)
            for n, (row, precision) in enumerate(rows)
            if _has_variants(row, precision)
        }
        for number, (row, precision) in enumerate(rows):
            name = f"{row.name} {precision}"
            with found.part(f"{name}: {steps} steps"):
                there = trained(row, precision, "cuda", steps)
                if row.name in _WHOLE:
                    _same_bits(found, place, row, precision, steps, there)
                if number in pairs:
                    _variants(found, name, row, precision, steps, there, pairs[number])
                apart = losses_apart(hosts[number].result(), there)
                title = f"{name}: losses of {steps} steps by the host's"
                found.within(title, apart, LIMITS[precision])


def _on_host(is_tiny: bool, number: int, steps: int, **options: object) -> Trained:
    """Train a row on the host, in a process of its own."""
    row, precision = proven_rows(is_tiny=is_tiny)[number]
    return trained(row, precision, "host", steps, **options)


def _has_variants(row: Row, precision: str) -> bool:
    return row.family == "gpt2" and precision == "bf16" and row.name in _WHOLE


def _same_bits(
    found: Findings, place: Place, row: Row, precision: str, steps: int, there: Trained
) -> None:
    """Compare a run with others of it that must give its bits; each has its own verdict."""
    name = f"{row.name} {precision}"
    with found.part(f"{name}: launch by launch"), synchronous():
        found.check(
            f"{name}: a graph and launch by launch have the same bits",
            trained(row, precision, "cuda", steps) == there,
        )
    folder = place.shared / f"run-{row.name}-{precision}"
    with found.part(f"{name}: resumed"):
        first = trained(row, precision, "cuda", steps // 2, folder)
        rest = trained(row, precision, "cuda", steps, folder)
        found.check(
            f"{name}: a resumed run has the same bits",
            rest.bits == there.bits and first.losses + rest.losses == there.losses,
        )


def _variants(
    found: Findings,
    name: str,
    row: Row,
    precision: str,
    steps: int,
    there: Trained,
    pair: Future[Trained],
) -> None:
    """Compare what comes of launches that run twice, and of gradients of several batches."""
    with found.part(f"{name}: blocks run twice"):
        again = trained(row, precision, "cuda", steps, recompute="blocks")
        found.check(f"{name}: with all blocks run twice, the same bits", again == there)
    with found.part(f"{name}: two batches a step"):
        apart = losses_apart(pair.result(), trained(row, precision, "cuda", steps, accumulate=2))
        title = f"{name}: losses of two batches a step by the host's"
        found.within(title, apart, LIMITS[precision])


def losses_apart(here: Trained, there: Trained) -> float:
    pairs = zip(here.losses, there.losses, strict=True)
    # Not Python's max, which does not see what is no number.
    return float(np.max([abs(a - b) for a, b in pairs]) / np.max(np.abs(here.losses)))


def trained(
    row: Row,
    precision: str,
    device: str,
    steps: int,
    folder: Path | None = None,
    **options: object,
) -> Trained:
    """Train a row until so many steps in total, from the newest checkpoint of a folder."""
    model, loss = FAMILIES[row.family](row)
    model.load(row.weights())
    options |= {"device": device} | ({"gpu": GPU} if device == "cuda" else {})
    losses: list[float] = []
    job_of(row, precision, loss, **options).fit(
        model,
        Rounds(row.batches()),
        steps=steps,
        progress=False,
        on_step=lambda step, metrics: losses.append(float(metrics["loss"])),
        **({} if folder is None else {"checkpoint": folder, "every": max(1, steps)}),
    )
    digest = hashlib.blake2b()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode() + np.ascontiguousarray(parameter.data).tobytes())
    return Trained(tuple(losses), digest.hexdigest())


@contextmanager
def synchronous() -> Iterator[None]:
    """Let every launch be waited for."""
    os.environ["ACTORFLOW_SYNC"] = "1"
    try:
        yield
    finally:
        del os.environ["ACTORFLOW_SYNC"]
