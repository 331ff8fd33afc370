"""Transformers (Vaswani et al., 2017): a block in few words, and torch's layers and stacks.

A layer is a chain of branches, each added to what it reads. The norm comes after the sum, or before
the branch, which trains deep stacks without a warm-up (Xiong et al., 2020).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from actorflow import functional
from actorflow.nn.attention import MultiheadAttention, check_heads, tensor_parallel_sbp
from actorflow.nn.init import xavier_uniform_
from actorflow.nn.layers import MOST_LAYERS, Dropout, Linear, M, ModuleList, checked_extent
from actorflow.nn.module import Module
from actorflow.nn.norm_layers import LayerNorm
from actorflow.tensor.layouts import Words
from actorflow.tensor.literals import checked_size
from actorflow.tensor.tensor import Operand, Tensor
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError


class Attention(Module):
    """Multi-head self-attention on [batch, T, dim].

    One projection makes queries, keys and values. With `sbp={"model": af.split(0)}` the ranks along
    an axis of a job's mesh have heads of their own, and there are three: `q`, `k` and `v`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        sbp: Words | None = None,
    ) -> None:
        dim, heads = checked_size(dim, "dim"), checked_size(heads, "heads")
        if heads < 1 or dim % heads:
            raise CompileError(
                f"{find_source()}: attention needs dim divisible by heads, got {dim} and {heads}"
            )
        self.heads, self.causal = heads, causal
        first, last = tensor_parallel_sbp(sbp, "Attention", "heads")
        self.qkv = Linear(dim, 3 * dim) if first is None else None
        if first is not None:
            self.q, self.k, self.v = [Linear(dim, dim, sbp=first) for _ in range(3)]
        self.proj = Linear(dim, dim, sbp=last)
        self.drop = Dropout(dropout)

    def __call__(self, x: Tensor, segments: Operand | None = None) -> Tensor:
        """Return [batch, T, dim]. Of `segments` [batch, T] a query sees keys of its own alone."""
        if x.ndim != 3:
            raise CompileError(f"{find_source()}: Attention needs [batch, T, dim], got {x.type}")
        batch, length, dim = x.shape
        q, k, v = self._projected(x)
        mixed = functional.attention(q, k, v, causal=self.causal, segments=segments)
        joined = mixed.permute(0, 2, 1, 3).reshape(batch, length, dim)
        return self.drop(self.proj(joined))

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, [batch, heads, T, width]."""
        batch, length, dim = x.shape
        apart = (self.heads, dim // self.heads)
        if self.qkv is None:
            check_heads(self.heads, self.q.weight)
            heads = [part(x).reshape(batch, length, *apart) for part in (self.q, self.k, self.v)]
            return [part.permute(0, 2, 1, 3) for part in heads]
        together = self.qkv(x).reshape(batch, length, 3, *apart)
        parts = functional.chunk(together.permute(2, 0, 3, 1, 4), 3)
        return [part.reshape(batch, self.heads, length, dim // self.heads) for part in parts]


class MLP(Module):
    """Linear, GELU, Linear on the last axis; the hidden layer is `ratio` times as wide.

    With `sbp={"model": af.split(0)}` the ranks along an axis of a job's mesh share its columns.
    """

    def __init__(
        self, dim: int, *, ratio: int = 4, dropout: float = 0.0, sbp: Words | None = None
    ) -> None:
        wide = checked_extent("MLP", "dim", dim) * checked_extent("MLP", "ratio", ratio)
        first, last = tensor_parallel_sbp(sbp, "MLP", "hidden columns")
        self.up, self.down = Linear(dim, wide, sbp=first), Linear(wide, dim, sbp=last)
        self.drop = Dropout(dropout)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., dim]."""
        return self.drop(self.down(functional.gelu(self.up(x), approximate="tanh")))


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [batch, T, dim].

    With `sbp={"model": af.split(0)}` the ranks along an axis of a job's mesh share the heads, and
    the columns between the layers of the MLP.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        sbp: Words | None = None,
    ) -> None:
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = Attention(dim, heads=heads, causal=causal, dropout=dropout, sbp=sbp)
        self.mlp = MLP(dim, dropout=dropout, sbp=sbp)

    def __call__(self, x: Tensor, segments: Operand | None = None) -> Tensor:
        """Return a tensor of the same type as x; `segments` as `Attention` has them."""
        x = x + self.attn(self.norm1(x), segments)
        return x + self.mlp(self.norm2(x))


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)) on the last axis (Shazeer, 2020), by the names of LLaMA.

    `gate_proj` and `up_proj` are [hidden, dim], `down_proj` is [dim, hidden]. `sbp` as of `MLP`.
    """

    def __init__(
        self, dim: int, hidden: int, *, bias: bool = False, sbp: Words | None = None
    ) -> None:
        first, last = tensor_parallel_sbp(sbp, "SwiGLU", "hidden columns")
        self.gate_proj = Linear(dim, hidden, bias=bias, sbp=first)
        self.up_proj = Linear(dim, hidden, bias=bias, sbp=first)
        self.down_proj = Linear(hidden, dim, bias=bias, sbp=last)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., dim]."""
        return self.down_proj(functional.swiglu(self.gate_proj(x), self.up_proj(x)))


Function = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Function] = {"relu": functional.relu, "gelu": functional.gelu}


def _activation(given: str | Function) -> Function:
    function = _ACTIVATIONS.get(given) if isinstance(given, str) else given
    if function is None or not callable(function):
        raise CompileError(
            f"{find_source()}: activation must be 'relu', 'gelu' or a function, got {given!r}"
        )
    return function


class _ResidualLayer(Module):
    """What encoder and decoder layers have in common: sums of branches, the last of them an MLP."""

    _attentions: ClassVar[tuple[str, ...]] = ("self_attn",)
    self_attn: MultiheadAttention
    norm1: LayerNorm
    norm2: LayerNorm
    dropout1: Dropout
    dropout2: Dropout

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Function = functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        sbp: Words | None = None,
    ) -> None:
        first, last = tensor_parallel_sbp(sbp, type(self).__name__, "heads and hidden columns")
        for name in self._attentions:
            options: dict[str, Any] = {"batch_first": batch_first, "sbp": sbp}
            vars(self)[name] = MultiheadAttention(d_model, nhead, dropout, bias, **options)
        self.linear1 = Linear(d_model, dim_feedforward, bias=bias, sbp=first)
        self.linear2 = Linear(dim_feedforward, d_model, bias=bias, sbp=last)
        branches = range(1, len(self._attentions) + 2)
        vars(self).update(
            {f"norm{i}": LayerNorm(d_model, layer_norm_eps, bias=bias) for i in branches}
        )
        self.dropout = Dropout(dropout)
        vars(self).update({f"dropout{i}": Dropout(dropout) for i in branches})
        self.activation, self.norm_first = _activation(activation), norm_first

    def _feed(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))

    def _added(self, x: Tensor, norm: Module, branch: Function, drop: Dropout) -> Tensor:
        """Return x with what a branch and its dropout make of it; the norm is before or after."""
        return x + drop(branch(norm(x))) if self.norm_first else norm(x + drop(branch(x)))


class TransformerEncoderLayer(_ResidualLayer):
    """Attention of a sequence to itself, then two linear layers, on [T, batch, d_model].

    Parameters are named and start as torch's; without `bias` norms and layers have none. With
    `sbp={"model": af.split(0)}` the ranks along an axis of a job's mesh share the heads, as in
    `MultiheadAttention`, and the columns between the two linear layers.
    """

    def __call__(
        self,
        src: Tensor,
        src_mask: Operand | None = None,
        src_key_padding_mask: Operand | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return a tensor of the same type as src; masks as `MultiheadAttention` has them."""

        def attend(x: Tensor) -> Tensor:
            masks = (src_key_padding_mask, False, src_mask)
            return self.self_attn(x, x, x, *masks, is_causal=is_causal)[0]

        src = self._added(src, self.norm1, attend, self.dropout1)
        return self._added(src, self.norm2, self._feed, self.dropout2)


class TransformerDecoderLayer(_ResidualLayer):
    """As `TransformerEncoderLayer`, with attention to `memory` between its two branches."""

    _attentions = ("self_attn", "multihead_attn")
    multihead_attn: MultiheadAttention
    norm3: LayerNorm
    dropout3: Dropout

    def __call__(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Operand | None = None,
        memory_mask: Operand | None = None,
        tgt_key_padding_mask: Operand | None = None,
        memory_key_padding_mask: Operand | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return a tensor of the same type as tgt; masks as `MultiheadAttention` has them."""

        def attend(x: Tensor) -> Tensor:
            masks = (tgt_key_padding_mask, False, tgt_mask)
            return self.self_attn(x, x, x, *masks, is_causal=tgt_is_causal)[0]

        def recall(x: Tensor) -> Tensor:
            masks = (memory_key_padding_mask, False, memory_mask)
            return self.multihead_attn(x, memory, memory, *masks, is_causal=memory_is_causal)[0]

        tgt = self._added(tgt, self.norm1, attend, self.dropout1)
        tgt = self._added(tgt, self.norm2, recall, self.dropout2)
        return self._added(tgt, self.norm3, self._feed, self.dropout3)


class TransformerEncoder(Module):
    """`num_layers` layers like the one given, and a norm; each starts with numbers of its own."""

    def __init__(
        self, encoder_layer: TransformerEncoderLayer, num_layers: int, norm: Module | None = None
    ) -> None:
        self.layers, self.norm = _copies(encoder_layer, num_layers), norm

    def __call__(
        self,
        src: Tensor,
        mask: Operand | None = None,
        src_key_padding_mask: Operand | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return a tensor of the same type as src."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(Module):
    """`num_layers` layers like the one given, and a norm; each starts with numbers of its own."""

    def __init__(
        self, decoder_layer: TransformerDecoderLayer, num_layers: int, norm: Module | None = None
    ) -> None:
        self.layers, self.norm = _copies(decoder_layer, num_layers), norm

    def __call__(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Operand | None = None,
        memory_mask: Operand | None = None,
        tgt_key_padding_mask: Operand | None = None,
        memory_key_padding_mask: Operand | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return a tensor of the same type as tgt."""
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        for layer in self.layers:
            tgt = layer(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        return tgt if self.norm is None else self.norm(tgt)


class Transformer(Module):
    """An encoder, and a decoder that attends to its result, as torch's `nn.Transformer`.

    Both end with a norm, and weights of two axes start by `nn.init.xavier_uniform_`; a
    `custom_encoder` or `custom_decoder` is taken as it is. `sbp` as of `TransformerEncoderLayer`.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Function = functional.relu,
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        sbp: Words | None = None,
    ) -> None:
        sizes = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps)
        options: dict[str, Any] = {"batch_first": batch_first, "norm_first": norm_first}
        options |= {"bias": bias, "sbp": sbp}

        def norm() -> LayerNorm:
            return LayerNorm(d_model, layer_norm_eps, bias=bias)

        if custom_encoder is None:
            layer = TransformerEncoderLayer(*sizes, **options)
            self.encoder = _glorot(TransformerEncoder(layer, num_encoder_layers, norm()))
        else:
            self.encoder = custom_encoder
        if custom_decoder is None:
            deep = TransformerDecoderLayer(*sizes, **options)
            self.decoder = _glorot(TransformerDecoder(deep, num_decoder_layers, norm()))
        else:
            self.decoder = custom_decoder
        self.d_model, self.batch_first = checked_size(d_model, "d_model"), batch_first

    def __call__(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Operand | None = None,
        tgt_mask: Operand | None = None,
        memory_mask: Operand | None = None,
        src_key_padding_mask: Operand | None = None,
        tgt_key_padding_mask: Operand | None = None,
        memory_key_padding_mask: Operand | None = None,
        src_is_causal: bool = False,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return a tensor of the same type as tgt [T, batch, d_model], for src [S, batch, d_model].

        With `batch_first` the first two axes are the other way round. Masks are those of
        `MultiheadAttention`; `tgt_is_causal` is the mask of a decoder, without an array.
        """
        axis = 0 if self.batch_first else 1
        is_batch = src.ndim == tgt.ndim == 3 and src.shape[axis] == tgt.shape[axis]
        widths = {src.shape[-1:], tgt.shape[-1:]}
        if not (is_batch or src.ndim == tgt.ndim == 2) or widths != {(self.d_model,)}:
            order = "[batch, T, d_model]" if self.batch_first else "[T, batch, d_model]"
            raise CompileError(
                f"{find_source()}: Transformer expects src and tgt {order} of one batch, or without"
                f" it, and d_model={self.d_model}; got {src.type} and {tgt.type}"
            )
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        decoded: Tensor = self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal)
        return decoded

    @staticmethod
    def generate_square_subsequent_mask(sz: int) -> np.ndarray[Any, Any]:
        """Return the mask of a decoder for `sz` places: 0, and -inf for later ones, float32."""
        size = checked_extent("the mask", "sz", sz)
        return np.triu(np.full((size, size), -np.inf, np.float32), 1)


def _glorot(stack: Module) -> Module:
    """Let all weights of two and more axes of a module begin as torch's `Transformer` does."""
    for _, parameter in stack.named_parameters():
        if parameter.ndim > 1:
            xavier_uniform_(parameter)
    return stack


def _copies(layer: M, count: int) -> ModuleList[M]:
    if not isinstance(layer, Module):
        raise CompileError(f"{find_source()}: a layer must be a module, got {type(layer).__name__}")
    num = checked_extent("Transformer", "num_layers", count, MOST_LAYERS)
    return ModuleList([layer, *[copy.deepcopy(layer) for _ in range(num - 1)]][:num])
