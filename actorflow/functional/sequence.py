"""Functions on sequences: attention, rotary positions, connectionist temporal classification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.functional.activation import softmax
from actorflow.functional.arranging import arange
from actorflow.functional.control import scan
from actorflow.functional.elementwise import cos, exp, log, logical_and, maximum, sin, where
from actorflow.functional.indexing import broadcast_shapes as broadcast_extents
from actorflow.functional.indexing import gather, take_along_axis
from actorflow.functional.loss import mean_by_weight, reduced
from actorflow.functional.random import dropped_by, drops_all
from actorflow.functional.reduce import cumsum
from actorflow.functional.shape import concat, stack
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Operand, Tensor, apply_many, as_tensor, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.contract.types import DType
from compiler.ops.families.attention import ATTENTION

__all__ = [
    "attention",
    "ctc_loss",
    "rotary",
    "scaled_dot_product_attention",
]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, segments: Operand | None = None
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017): softmax(q kT / sqrt(d)) v.

    Args:
        q: [..., T, d].
        k: [..., S, d].
        v: [..., S, e].
        causal: row i attends to columns j <= i + (S - T) only: the last query sees all keys, as it
            must where keys are kept of earlier steps. Where S is not T this is another mask than
            that of `scaled_dot_product_attention`, whose first query sees the first key alone.
        segments: as of `scaled_dot_product_attention`; then S is T.
    """
    if segments is not None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, segments=segments)
    q, k = as_tensor(q), as_tensor(k)
    return _attended(q, k, as_tensor(v), 1.0 / math.sqrt(max(q.shape[-1], 1)), causal=causal)


@in_float32
def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Return what a pass makes one op of, but can be differentiated twice."""
    return softmax(q @ k.swapaxes(-1, -2), scale=scale, causal=causal) @ v


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Operand | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    segments: Operand | None = None,
) -> Tensor:
    """Return softmax(scale q kT + mask) v, as torch's function of this name.

    Scores exist a few rows at a time, also with a mask, dropout and shared heads; whole [..., T, S]
    in the gradient of a mask that is trained. Of segments a mask [batch, 1, T, T] exists, one for
    all heads, and for all layers that have the same segments.

    Args:
        query: [..., T, d], heads before the last two axes.
        key: [..., S, d].
        value: [..., S, e].
        attn_mask: broadcasts to [..., T, S]: bool, True where a query sees a key, or floats that
            are added. A query that sees nothing (-inf in floats) gives zeros.
        dropout_p: the probability with which a weight is dropped; in training alone, unlike torch.
        is_causal: row i attends to columns j <= i only; not together with a mask.
        scale: 1 / sqrt(d) by default.
        enable_gqa: several heads of queries share one of keys and values, in order.
        segments: integers [batch, T], the first axis that of q, where S is T: a query sees keys of
            its own segment alone, as in `af.data.pack`. Together with `is_causal`, or with a mask.

    Raises CompileError for shapes that do not fit.
    """
    q, k, v = as_tensor(query), as_tensor(key), as_tensor(value)
    is_fitting = min(q.ndim, k.ndim, v.ndim) > 1 and q.dtype.is_float
    if not is_fitting or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise CompileError(
            f"{find_source()}: attention expects floats: queries [..., T, d], keys [..., S, d] and"
            f" values [..., S, e], got {q.type}, {k.type} and {v.type}"
        )
    if is_causal and attn_mask is not None:
        raise CompileError(
            f"{find_source()}: attention got is_causal and attn_mask; say both in the mask"
        )
    rows, columns = q.shape[-2], k.shape[-2]
    mask = None if attn_mask is None else _additive(as_tensor(attn_mask, DType.BOOL), q.dtype)
    if segments is not None:
        within = _additive(same_segment(q, k, segments, causal=is_causal), q.dtype)
        mask, is_causal = within if mask is None else within + mask, False
    together: tuple[Tensor, ...] = (q, k, v) if mask is None else (q, k, v, mask)
    if enable_gqa:
        together = _grouped(*together)
    q, k, v, *masks = _one_batch(*together)
    factor = 1.0 / math.sqrt(max(q.shape[-1], 1))
    if scale is not None:
        factor = checked_number(scale, "the scale of attention")
    if factor <= 0.0:
        q, factor = q * factor, 1.0
    if is_causal and rows < columns:  # no query sees the keys after the last one of its own
        k, v, columns = k[..., :rows, :], v[..., :rows, :], rows
    if drops_all(dropout_p):  # of no weight is there anything left
        v, dropout_p = v * 0.0, 0.0
    draws, options = dropped_by(dropout_p)
    if columns and (masks or draws or (is_causal and rows > columns)):
        options = {"scale": factor, "causal": is_causal, **options}
        y = apply_many(ATTENTION, q, k, v, *masks, *draws, **options)[0]
    else:
        y = _attended(q, k, v, factor, causal=is_causal)
    return y.flatten(-4, -3) if enable_gqa else y


def same_segment(q: Tensor, k: Tensor, segments: Operand, *, causal: bool = False) -> Tensor:
    """Return [batch, 1 ..., T, T]: which keys a query sees, bool. Raises CompileError."""
    x, length = as_tensor(segments, DType.INT64), q.shape[-2]
    is_fitting = q.ndim > 2 and x.shape == (q.shape[0], length) and k.shape[-2] == length
    if not is_fitting or not x.dtype.is_integer:
        raise CompileError(
            f"{find_source()}: attention expects segments of integers [batch, T] for queries and"
            f" keys [batch, ..., T, d], got {x.type}, {q.type} and {k.type}"
        )
    x = x.reshape(x.shape[0], *(1,) * (q.ndim - 3), length)
    is_seen = x.unsqueeze(-1) == x.unsqueeze(-2)
    if not causal:
        return is_seen
    places = arange(length)
    return logical_and(is_seen, places.unsqueeze(-1) >= places)


def _additive(mask: Tensor, dtype: DType) -> Tensor:
    """Return a mask that is added to scores; no gradient flows into one of bools."""
    if mask.dtype is DType.BOOL:
        return where(mask, 0.0, -math.inf).detach().to(dtype)
    if not mask.dtype.is_float:
        raise CompileError(
            f"{find_source()}: the mask of attention must be bool or floats, got {mask.type}"
        )
    return mask.to(dtype)


def _grouped(q: Tensor, k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return operands with an axis of heads of keys, and one of the queries that share each."""
    heads, key_heads = q.shape[-3] if q.ndim > 2 else 1, k.shape[-3] if k.ndim > 2 else 0
    for x in (k, others[0]):
        if not key_heads or heads % key_heads or x.ndim < 3 or x.shape[-3] != key_heads:
            raise CompileError(
                f"{find_source()}: grouped attention expects [..., heads, T, d] with the heads of"
                f" queries divisible by those of keys and values, got {q.type} and {x.type}"
            )
    grouped = []
    for x in (q, k, *others):
        count = x.shape[-3] if x.ndim > 2 else 1
        groups = (key_heads, heads // key_heads) if count == heads else (count, 1)
        grouped.append(x.reshape(*x.shape[:-3], *groups, *x.shape[-2:]))
    return tuple(grouped)


def _one_batch(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
    """Return operands with equal leading axes, seen and not copied, and a mask of their rank."""
    batch = broadcast_extents([x.shape[:-2] for x in (q, k, v)], "the leading axes of attention")
    whole = (*batch, q.shape[-2], k.shape[-2])
    for mask in masks:
        if broadcast_extents([mask.shape, whole], "the mask of attention") != whole:
            raise CompileError(
                f"{find_source()}: attention expects a mask that broadcasts to {list(whole)}, got"
                f" {mask.type}"
            )
    aligned = [x.reshape((1,) * (len(whole) - x.ndim) + x.shape) for x in masks]
    return *[x.broadcast_to(*batch, *x.shape[-2:]) for x in (q, k, v)], *aligned


@in_float32
def rotary(
    x: Tensor,
    positions: Operand | None = None,
    base: float = 10000.0,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Turn pairs of columns by angles that grow with the position (Su et al., RoFormer, 2021).

    Args:
        x: [..., T, d] with an even d: queries or keys, heads before the last two axes.
        positions: integers that broadcast to [..., T]; 0 .. T-1 by default.
        base: pair i turns by position / base^(2 i / d).
        interleaved: pairs are columns (2 i, 2 i + 1), as in RoFormer and GPT-J; else columns
            (i, i + d / 2), as in GPT-NeoX and LLaMA's published weights for transformers.
    """
    x, number = as_tensor(x), checked_number(base, "the base of rotary")
    if x.ndim < 2 or x.shape[-1] % 2 or not number > 0:
        raise CompileError(
            f"{find_source()}: rotary expects [..., T, d] of an even d and a base above 0, got"
            f" {x.type} and {number}"
        )
    length, width = x.shape[-2:]
    speeds = number ** (np.arange(width // 2) * (-2.0 / max(width, 1)))
    dtype = x.dtype.value
    if positions is None:
        angles = np.arange(length)[:, None] * speeds
        c, s = as_tensor(np.cos(angles).astype(dtype)), as_tensor(np.sin(angles).astype(dtype))
    else:
        where_at = as_tensor(positions, DType.INT64).to(x.dtype)
        turned = where_at.reshape(*where_at.shape, 1) * speeds.astype(dtype)
        c, s = cos(turned), sin(turned)
    if not interleaved:
        a, b = x[..., : width // 2], x[..., width // 2 :]
        return concat([a * c - b * s, b * c + a * s], dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    parts = [t.reshape(*t.shape, 1) for t in (a * c - b * s, b * c + a * s)]
    return concat(parts, dim=-1).reshape(x.shape)


Lengths = Tensor | np.ndarray | Sequence[int] | int

_NEVER = -1e37
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

    Connectionist temporal classification (Graves et al., 2006). A scan over the inputs, in
    logarithms. A target that no alignment can give (it is longer than its input, repeats counted
    twice) costs infinity and has no gradient.

    Args:
        log_probs: [T, N, C], or [T, C] of one sequence: `log_softmax` of logits.
        targets: classes, none of them blank: [N, S], padded with anything; or all one after the
            other, [sum of target_lengths].
        input_lengths: [N], each up to T: integers, or a tensor of them.
        target_lengths: [N], as input_lengths.
        blank: the class that stands for none.
        reduction: "none", "sum", "mean": of losses divided by the lengths of their targets, or
            "tokens": the sum divided by that of the lengths, which is the weight of the batch.
        zero_infinity: let a target that no alignment can give cost nothing.

    Raises CompileError with the user's line.
    """
    x, y = as_tensor(log_probs), as_tensor(targets, DType.INT64).to("int64")
    lengths = input_lengths, target_lengths
    if x.ndim == 2:
        # Of one sequence: of a batch of one, whose targets stand one after the other anyway.
        one = [length.reshape(1) if isinstance(length, Tensor) else length for length in lengths]
        rows = x.reshape(x.shape[0], 1, x.shape[1])
        loss = ctc_loss(rows, y.reshape(-1), one[0], one[1], blank, reduction, zero_infinity)
        return loss.reshape(()) if reduction == "none" else loss
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
    if reduction == "tokens":
        count = num_targets.to(x.dtype).sum()
        return mean_by_weight(losses.sum(), count, batch * labels.shape[1])
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
    emissions = gather(x, 2, states.reshape(1, batch, size).broadcast_to(steps, batch, size))
    emissions = maximum(emissions, _NEVER)
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
    alpha, _ = scan(step, as_tensor(first), (emissions, arange(steps)))
    last = (num_targets * 2).reshape(batch, 1)
    ends = [take_along_axis(alpha, maximum(place, 0), 1) for place in (last, last - 1)]
    at_blank, at_label = ends[0], where(last > 0, ends[1], _NEVER)
    most = maximum(at_blank, at_label).detach()
    return -(most + log(exp(at_blank - most) + exp(at_label - most))).reshape(batch)


def _lengths(what: str, given: Any, batch: int) -> Tensor:
    if not isinstance(given, Tensor):
        given = np.array(integers(given, what=f"one of {what}"))
    lengths = as_tensor(given).to("int64")
    if lengths.shape != (batch,):
        raise CompileError(
            f"{find_source()}: {what} of ctc_loss needs one integer for each of {batch} sequences,"
            f" got {lengths.type}"
        )
    return lengths


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
