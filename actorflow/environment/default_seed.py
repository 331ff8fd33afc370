"""The seed of what is given none: of jobs without `seed=`, and of models that are read first."""

from __future__ import annotations

import random
import sys

import numpy as np

from actorflow.environment.option_values import IntRange
from actorflow.environment.settings import logger
from compiler.contract.errors import CompileError

SEEDS = IntRange(0, (1 << 63) - 1)
"""The seeds that are permitted."""

_SEEDS_OF_NUMPY = IntRange(0, (1 << 32) - 1)

_seeds = [0]
"""The default of this process: state of the process, as that of torch.manual_seed."""


def seed(number: int) -> None:
    """Set the seed of jobs that are given none, and of models whose values are read before a run.

    Calls that begin later have it; ranks of a job compare their seeds before they run. Raises
    CompileError for what is no seed.
    """
    if expected := SEEDS.expected(number):
        raise CompileError(f"af.seed: expected {expected}, got {number!r}")
    _seeds[0] = number


def seed_everything(number: int) -> int:
    """Do what `seed` does, and seed the global generators of Python and numpy; return the seed.

    Also those of torch, of all its devices, where it is imported already. Jobs and data sources of
    actorflow draw from none of them: they are for code of the user's own. The log says what was
    seeded, at the level INFO. Raises CompileError for what is no integer from 0 to 2^32 - 1, as
    numpy takes no other.
    """
    if expected := _SEEDS_OF_NUMPY.expected(number):
        raise CompileError(f"af.seed_everything: expected {expected}, got {number!r}")
    seed(number)
    random.seed(number)
    np.random.seed(number)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(number)
    others = "random and numpy.random" if torch is None else "random, numpy.random and torch"
    logger.info("seed %d for actorflow, and for %s", number, others)
    return number


def default_seed() -> int:
    """Return it; 0 before `seed` is called."""
    return _seeds[0]
