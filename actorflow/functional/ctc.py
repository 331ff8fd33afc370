"""Connectionist temporal classification (Graves et al., 2006)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.control import scan
from actorflow.functional.creating import arange
from actorflow.functional.cumulative import cumsum
from actorflow.functional.elementwise import exp, log, maximum, where
from actorflow.functional.indexing import gather, take_along_axis
from actorflow.functional.loss import reduced
from actorflow.functional.shape import concat, stack
from actorflow.literals import checked_size
from actorflow.tensor import Tensor, as_tensor, integers
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.types import DType

__all__ = ["ctc_loss"]

Lengths = Tensor | np.ndarray | Sequence[int] | int

_NEVER = -1e30
"""The logarithm of what cannot be: finite, so that sums and gradients of it are."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return how unlikely the targets are, by all their alignments with the inputs.

    A scan over the inputs, in logarithms. A target that no alignment can give (it is longer than
    its input, repeats counted twice) costs infinity and has no gradient.

    Args:
        log_probs: [T, N, C], or [T, C] of one sequence: `log_softmax` of logits.
        targets: classes, none of them blank: [N, S], padded with anything; or all one after the
            other, [sum of target_lengths].
        input_lengths: [N], each up to T: integers, or a tensor of them.
        target_lengths: [N], as input_lengths.
        blank: the class that stands for none.
        reduction: "none", "sum", or "mean": of losses divided by the lengths of their targets.
        zero_infinity: let a target that no alignment can give cost nothing.

    Raises CompileError with the user's line.
    """
    x, y = as_tensor(log_probs), as_tensor(targets, DType.INT64).to("int64")
    lengths = input_lengths, target_lengths
    if x.ndim == 2:
        # Of one sequence: of a batch of one, whose targets stand one after the other anyway.
        one = [own.reshape(1) if isinstance(own, Tensor) else own for own in lengths]
        rows = x.reshape(x.shape[0], 1, x.shape[1])
        found = ctc_loss(rows, y.reshape(-1), one[0], one[1], blank, reduction, zero_infinity)
        return found.reshape(()) if reduction == "none" else found
    empty = checked_size(blank, "blank")
    if x.ndim != 3 or not x.dtype.is_float or y.ndim not in (1, 2):
        raise CompileError(
            f"{find_source()}: ctc_loss expects log_probs [T, N, C] and targets [N, S] or one after"
            f" the other, got {x.type} and {y.type}"
        )
    _, batch, classes = x.shape
    if not 0 <= empty < classes:
        raise CompileError(f"{find_source()}: blank must be in 0..{classes - 1}, got {empty}")
    num_inputs = _lengths("input_lengths", input_lengths, batch)
    num_targets = _lengths("target_lengths", target_lengths, batch)
    labels = _padded(y, num_targets, target_lengths, batch, empty)
    wide = x if x.dtype in (DType.FLOAT32, DType.FLOAT64) else x.to("float32")
    losses = _forward(wide, labels, num_inputs, num_targets, empty)
    is_never = losses > -_NEVER / 10.0
    losses = where(is_never, 0.0 if zero_infinity else np.inf, losses).to(x.dtype)
    if reduction != "mean":
        return reduced(losses, reduction)
    return (losses / maximum(num_targets, 1).to(x.dtype)).mean()


def _forward(
    x: Tensor, labels: Tensor, num_inputs: Tensor, num_targets: Tensor, blank: int
) -> Tensor:
    """Return -log of the sum over all alignments of each sequence.

    States are a blank, the first label, a blank, the second one and so on: 2 S + 1 of them.
    """
    steps, batch, _ = x.shape
    count = labels.shape[1]
    blanks = as_tensor(np.full((batch, count + 1), blank, np.int64))
    states = blanks
    if count:
        pairs = stack([blanks[:, :count], labels], 2).reshape(batch, 2 * count)
        states = concat([pairs, blanks[:, :1]], 1)
    size = states.shape[1]
    seen = gather(x, 2, states.reshape(1, batch, size).broadcast_to(steps, batch, size))
    seen = maximum(seen, _NEVER)
    never = as_tensor(np.full((batch, 2), _NEVER, x.dtype.value))
    # From one label straight to the next, past the blank between, unless they are the same.
    before = concat([states[:, :1], states[:, :1], states[:, : size - 2]], 1) if count else states
    leaps = where((states != before) & (states != blank), 0.0, _NEVER).to(x.dtype)

    def step(alpha: Tensor, entry: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        now, number = entry
        stay, one = alpha, concat([never[:, :1], alpha[:, : size - 1]], 1)
        two = one if size < 2 else concat([never, alpha[:, : size - 2]], 1)
        two = maximum(two + leaps, _NEVER)
        most = maximum(maximum(stay, one), two).detach()
        total = most + log(exp(stay - most) + exp(one - most) + exp(two - most)) + now
        is_inside = (number < num_inputs).reshape(batch, 1)
        return where(is_inside, maximum(total, _NEVER), alpha), None

    first = np.full((batch, size), _NEVER, x.dtype.value)
    first[:, 0] = 0.0
    alpha, _ = scan(step, as_tensor(first), (seen, arange(steps)))
    last = (num_targets * 2).reshape(batch, 1)
    ends = [take_along_axis(alpha, maximum(place, 0), 1) for place in (last, last - 1)]
    at_blank, at_label = ends[0], where(last > 0, ends[1], _NEVER)
    most = maximum(at_blank, at_label).detach()
    return -(most + log(exp(at_blank - most) + exp(at_label - most))).reshape(batch)


def _lengths(what: str, given: Any, batch: int) -> Tensor:
    if not isinstance(given, Tensor):
        given = np.array(integers(given, what=f"one of {what}"))
    found = as_tensor(given).to("int64")
    if found.shape != (batch,):
        raise CompileError(
            f"{find_source()}: {what} of ctc_loss needs one integer for each of {batch} sequences,"
            f" got {found.type}"
        )
    return found


def _padded(y: Tensor, lengths: Tensor, given: Lengths, batch: int, blank: int) -> Tensor:
    """Return targets [N, S] with blanks behind their ends."""
    most = y.shape[-1]
    if not isinstance(given, Tensor):
        most = min(most, int(np.max(np.asarray(given), initial=0)))
    places = as_tensor(np.arange(most, dtype=np.int64)).reshape(1, most)
    is_label = places < lengths.reshape(batch, 1)
    if y.ndim == 2:
        if y.shape[0] != batch:
            raise CompileError(
                f"{find_source()}: ctc_loss expects targets of {batch} sequences, got {y.type}"
            )
        return where(is_label, y[:, :most], blank)
    if not most:
        return as_tensor(np.zeros((batch, 0), np.int64))
    starts = (cumsum(lengths, 0) - lengths).reshape(batch, 1)
    at = where(is_label, starts + places, 0).reshape(batch * most)
    return where(is_label, gather(y, 0, at).reshape(batch, most), blank)
