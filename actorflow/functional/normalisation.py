"""Normalisation."""

from __future__ import annotations

from actorflow.literals import checked_number
from actorflow.tensor import Tensor, apply_many
from compiler.ops import norm

__all__ = ["layer_norm"]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift (Ba et al., 2016)."""
    small = checked_number(eps, "the eps of layer_norm")
    return apply_many(norm.LAYER_NORM, x, weight, bias, eps=small)[0]
