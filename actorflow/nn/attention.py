"""Attention of several heads, with torch's names and masks, and how ranks share a block of layers.

`tensor_parallel_sbp` cuts a block whose inner width ranks share: heads of attention, hidden columns
of an MLP. The first layer is cut by what it makes, and the last one by what it reads, so that
between the two no rank needs what others have, and their terms meet in one sum (Shoeybi et al.,
Megatron-LM, 2019).
"""

from __future__ import annotations

import math

import numpy as np

from actorflow import functional
from actorflow.functional.random import checked_probability
from actorflow.functional.sequence import same_segment
from actorflow.nn.layers import Linear, checked_extent
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter, lay_out
from actorflow.tensor.layouts import Words, layout_of
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Operand, Tensor, as_tensor
from actorflow.tensor.tracer import current_trace, find_source
from compiler.contract.errors import CompileError
from compiler.contract.sbp import BROADCAST, Sbp, Split
from compiler.contract.types import DType


def tensor_parallel_sbp(
    sbp: Words | None, layer: str, what: str
) -> tuple[Words | None, Words | None]:
    """Return the layouts of the weights [out, in] of the first and the last layers of a block.

    `what` is what its ranks share, such as heads. Raises CompileError with the user's line for
    another word than af.split(0) or af.broadcast.
    """
    if sbp is None:
        return None, None
    first = dict(layout_of(sbp, f"sbp of {layer}"))
    for word in first.values():
        if word not in (Split(0), BROADCAST):
            raise CompileError(
                f"{find_source()}: sbp of {layer} must be af.split(0), which splits {what} over"
                f" ranks, or af.broadcast, which keeps all of them on each rank; got {word}"
            )
    last: dict[str, Sbp] = {
        axis: Split(1) if word == Split(0) else word for axis, word in first.items()
    }
    return first, last


def check_heads(heads: int, first: object) -> None:
    """Raise CompileError where a head would lie on two ranks of the job that is traced.

    `first` makes them: its rows are split, and not its heads. A tensor in the place of a parameter
    has no layout of its own.
    """
    trace, words = current_trace(), first.sbp if isinstance(first, Parameter) else {}
    if not words or trace is None or trace.mesh is None:
        return
    mesh = trace.mesh
    extents = dict(zip(mesh.names, mesh.shape, strict=True))
    parts = math.prod([extents.get(axis, 1) for axis, word in words.items() if word == Split(0)])
    if heads % parts:
        raise CompileError(
            f"{find_source()}: {parts} ranks cannot share {heads} heads (the mesh is {mesh}): their"
            " number must divide that of the heads"
        )


_ZEROS = (("kind", "zeros"),)


class MultiheadAttention(Module):
    """Attention of `num_heads` heads (Vaswani et al., 2017) on [T, batch, embed_dim].

    With `batch_first` on [batch, T, embed_dim]; without a batch on [T, embed_dim]. The weights of
    the projections start uniform (Glorot & Bengio, 2010), biases at 0. Keys of `kdim` and values of
    `vdim` columns have projections of their own.

    `sbp={"model": af.split(0)}` gives the ranks along an axis of a job's mesh heads of their own,
    with the rows of the projections that make them and the columns of `out_proj` that read them.
    The three projections are parameters of their own then, as with `kdim`, on one rank too.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        sbp: Words | None = None,
    ) -> None:
        dim = checked_extent("MultiheadAttention", "embed_dim", embed_dim)
        heads = checked_extent("MultiheadAttention", "num_heads", num_heads)
        if dim % heads or add_bias_kv or add_zero_attn:
            raise CompileError(
                f"{find_source()}: MultiheadAttention needs embed_dim divisible by num_heads, and"
                f" takes neither add_bias_kv nor add_zero_attn; got {dim}, {heads}, {add_bias_kv}"
                f" and {add_zero_attn}"
            )
        self.num_heads, self.batch_first = heads, batch_first
        self.dropout = checked_probability(dropout)
        widths = [
            dim if width is None else checked_extent("MultiheadAttention", "kdim and vdim", width)
            for width in (None, kdim, vdim)
        ]
        self.in_proj_weight: Parameter | None = None
        if widths == [dim] * 3 and sbp is None:
            self.in_proj_weight = _glorot(3 * dim, dim)
        else:
            weights = [_glorot(dim, size) for size in widths]
            self.q_proj_weight, self.k_proj_weight, self.v_proj_weight = weights
        self.in_proj_bias = Parameter((3 * dim,), _ZEROS) if bias else None
        self.out_proj = Linear(dim, dim, bias=bias)
        if self.out_proj.bias is not None:
            self.out_proj.bias = Parameter((dim,), _ZEROS)
        if sbp is not None:
            first, last = tensor_parallel_sbp(sbp, "MultiheadAttention", "heads")
            for projection in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                lay_out("MultiheadAttention", first, weight=projection)
            out = self.out_proj
            lay_out("MultiheadAttention", last, weight=out.weight, bias=out.bias)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Operand | None = None,
        need_weights: bool = True,
        attn_mask: Operand | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        segments: Operand | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the queries get, and the weights [batch, T, S] or None.

        A query that sees nothing gets zeros. Weights are those before dropout; a job that does not
        use them computes none of them, and then no matrix of scores exists.

        Args:
            query: [T, batch, embed_dim]; see the class.
            key: [S, batch, kdim].
            value: [S, batch, vdim].
            key_padding_mask: [batch, S]: bool, True for keys that nobody sees, or floats to add.
            need_weights: Whether to return weights.
            attn_mask: [T, S] or [batch * num_heads, T, S]: bool, True where a query does not see a
                key, or floats to add.
            average_attn_weights: Else weights are [batch, num_heads, T, S].
            is_causal: Query i sees keys up to i; attn_mask, if given, says the same.
            segments: Integers [batch, T] where S is T: a query sees keys of its own segment alone.
        """
        q, k, v = as_tensor(query), as_tensor(key), as_tensor(value)
        has_batch = q.ndim == 3
        if not (q.ndim == k.ndim == v.ndim) or q.ndim not in (2, 3):
            raise CompileError(
                f"{find_source()}: MultiheadAttention expects queries, keys and values of 3 axes,"
                f" or of 2 without a batch, got {q.type}, {k.type} and {v.type}"
            )
        if self.in_proj_weight is None:
            check_heads(self.num_heads, self.q_proj_weight)
        parts = self._projected(q, k, v)
        q, k, v = [self._heads(part, has_batch) for part in parts]
        mask = self._mask(q, k, key_padding_mask, None if is_causal else attn_mask)
        if segments is not None:
            own = same_segment(q, k, segments)
            mask = own if mask is None else _joined(mask, own)
        if is_causal and mask is not None:
            causal = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
            mask, is_causal = _joined(mask, as_tensor(causal, DType.BOOL)), False
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout, is_causal=is_causal
        )
        joined = mixed.permute(0, 2, 1, 3) if self.batch_first else mixed.permute(2, 0, 1, 3)
        joined = joined.flatten(-2, -1)
        if not has_batch:
            joined = joined.squeeze(0 if self.batch_first else 1)
        weights = None
        if need_weights:
            if is_causal:
                mask = as_tensor(np.tri(q.shape[-2], k.shape[-2], dtype=bool), DType.BOOL)
            weights = _weights(q, k, mask)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if has_batch else weights.squeeze(0)
        return self.out_proj(joined), weights

    def _projected(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return queries, keys and values; of one tensor they are one product."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and q is k and k is v:
            return [*functional.chunk(functional.linear(q, weight, bias), 3, dim=-1)]
        weights = (
            [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            if weight is None
            else (functional.chunk(weight, 3, dim=0))
        )
        biases = [None] * 3 if bias is None else functional.chunk(bias, 3, dim=0)
        return [functional.linear(*each) for each in zip((q, k, v), weights, biases, strict=True)]

    def _heads(self, x: Tensor, has_batch: bool) -> Tensor:
        """Return [batch, heads, T, width]."""
        if not has_batch:
            x = x.unsqueeze(0 if self.batch_first else 1)
        apart = x.reshape(*x.shape[:2], self.num_heads, x.shape[-1] // self.num_heads)
        return apart.permute(0, 2, 1, 3) if self.batch_first else apart.permute(1, 2, 0, 3)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Operand | None, given: Operand | None
    ) -> Tensor | None:
        """Return both masks as one for [batch, heads, T, S]; of bools, True where a key is seen."""
        merged: Tensor | None = None
        (batch, heads, rows, _), columns = q.shape, k.shape[-2]
        shapes = {
            "attn_mask": ((rows, columns), (batch * heads, rows, columns)),
            "key_padding_mask": ((batch, columns), (columns,)),
        }
        for (name, allowed), mask in zip(shapes.items(), (given, padding), strict=True):
            if mask is None:
                continue
            x = as_tensor(mask, DType.BOOL)
            if x.shape not in allowed:
                raise CompileError(
                    f"{find_source()}: {name} expects {' or '.join(map(str, map(list, allowed)))},"
                    f" got {x.type}"
                )
            x = ~x if x.dtype is DType.BOOL else x
            if name == "key_padding_mask":
                x = x.reshape(batch, 1, 1, columns)
            elif x.ndim == 3:
                x = x.reshape(batch, heads, rows, columns)
            merged = x if merged is None else _joined(merged, x)
        return merged


def _glorot(rows: int, columns: int) -> Parameter:
    bound = math.sqrt(6.0 / (rows + columns))
    return Parameter((rows, columns), (("kind", "uniform"), ("bound", bound)))


def _added(mask: Tensor) -> Tensor:
    return functional.where(mask, 0.0, -math.inf) if mask.dtype is DType.BOOL else mask


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask that hides what one of two hides."""
    if one.dtype is DType.BOOL and other.dtype is DType.BOOL:
        return functional.logical_and(one, other)
    return _added(one) + _added(other)


@in_float32
def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.swapaxes(-1, -2) * (1.0 / math.sqrt(max(q.shape[-1], 1)))
    return functional.softmax(scores if mask is None else scores + _added(mask))
