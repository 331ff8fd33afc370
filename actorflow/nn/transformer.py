"""The transformer block (Vaswani et al., 2017) in its pre-norm form (Xiong et al., 2020)."""

from __future__ import annotations

from actorflow import functional
from actorflow.literals import checked_size
from actorflow.nn.layers import Dropout, Linear
from actorflow.nn.module import Module
from actorflow.nn.normalisation import LayerNorm
from actorflow.tensor import Tensor
from actorflow.trace.tracer import find_source
from compiler.errors import CompileError


class Attention(Module):
    """Multi-head self-attention on [batch, T, dim].

    One projection makes queries, keys and values.
    """

    def __init__(self, dim: int, *, heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        dim, heads = checked_size(dim, "dim"), checked_size(heads, "heads")
        if heads < 1 or dim % heads:
            raise CompileError(
                f"{find_source()}: attention needs dim divisible by heads, got {dim} and {heads}"
            )
        self.heads, self.causal = heads, causal
        self.qkv, self.proj = Linear(dim, 3 * dim), Linear(dim, dim)
        self.drop = Dropout(dropout)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [batch, T, dim]."""
        batch, length, dim = x.shape
        heads = (batch, self.heads, length, dim // self.heads)
        together = self.qkv(x).reshape(batch, length, 3, self.heads, dim // self.heads)
        parts = functional.chunk(together.permute(2, 0, 3, 1, 4), 3)
        q, k, v = (part.reshape(heads) for part in parts)
        mixed = functional.attention(q, k, v, causal=self.causal)
        joined = mixed.permute(0, 2, 1, 3).reshape(batch, length, dim)
        return self.drop(self.proj(joined))


class MLP(Module):
    """Linear, GELU, Linear on the last axis; the hidden layer is `ratio` times as wide."""

    def __init__(self, dim: int, *, ratio: int = 4, dropout: float = 0.0) -> None:
        self.up, self.down = Linear(dim, ratio * dim), Linear(ratio * dim, dim)
        self.drop = Dropout(dropout)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x [..., dim]."""
        return self.drop(self.down(functional.gelu(self.up(x), approximate="tanh")))


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), on [batch, T, dim]."""

    def __init__(self, dim: int, *, heads: int, causal: bool = False, dropout: float = 0.0) -> None:
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim)
        self.attn = Attention(dim, heads=heads, causal=causal, dropout=dropout)
        self.mlp = MLP(dim, dropout=dropout)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))
