"""The seed of what is given none: of jobs without `seed=`, and of models that are read first."""

from __future__ import annotations

from actorflow.environment.option_values import IntRange
from compiler.contract.errors import CompileError

SEEDS = IntRange(0, (1 << 63) - 1)
"""The seeds that are permitted."""

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


def default_seed() -> int:
    """Return it; 0 before `seed` is called."""
    return _seeds[0]
