"""Steps of each job against the host; resumed runs and launches one by one have the same bits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    for row, precision in proven_rows(is_tiny=place.is_emulated):
        name = f"{row.name} {precision}"
        with found.part(f"{name}: {steps} steps"):
            here = trained(row, precision, "host", steps)
            there = trained(row, precision, "cuda", steps)
            apart = _apart(here, there)
            found.within(f"{name}: losses of {steps} steps by the host's", apart, LIMITS[precision])
            if row.name in _WHOLE:
                _same_bits(found, place, row, precision, steps, there)


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
    if row.family == "gpt2" and precision == "bf16":
        with found.part(f"{name}: its variants"):
            _variants(found, name, row, precision, steps, there)
    folder = place.shared / f"run-{row.name}-{precision}"
    with found.part(f"{name}: resumed"):
        first = trained(row, precision, "cuda", steps // 2, folder)
        rest = trained(row, precision, "cuda", steps, folder)
        found.check(
            f"{name}: a resumed run has the same bits",
            rest.bits == there.bits and first.losses + rest.losses == there.losses,
        )


def _variants(
    found: Findings, name: str, row: Row, precision: str, steps: int, there: Trained
) -> None:
    """Compare what comes of launches that run twice, and of gradients of several batches."""
    again = trained(row, precision, "cuda", steps, recompute="blocks")
    found.check(f"{name}: with all blocks run twice, the same bits", again == there)
    pair = [trained(row, precision, where, steps, accumulate=2) for where in ("host", "cuda")]
    apart = _apart(*pair)
    found.within(f"{name}: losses of two batches a step by the host's", apart, LIMITS[precision])


def _apart(here: Trained, there: Trained) -> float:
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
