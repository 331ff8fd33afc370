"""Attention on [batch, T, 3, heads, width]: a kernel of attention on views of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.kernels.interpret.attention import AttentionKernel
from actors.kernels.interpret.attention_grad import AttentionGradKernel
from actors.kernels.kernel import Attrs, Kernel, KernelNeeds, Operand
from actors.protocol import Array, Launch
from compiler.types import TensorType


@dataclass(frozen=True, slots=True)
class PackedAttentionKernel:
    """`packed_attention`: attrs scale, causal. `attention` computes it on views."""

    name: str
    attention: Kernel
    op: str = "packed_attention"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take what the kernel of attention takes as views."""
        y, lse = outputs
        needs = self.attention.query(attrs, parts_of(inputs[0]), (by_head(y), lse))
        return None if needs is None else replace(needs, in_place=())

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch of attention on views."""
        y, lse = outputs
        return self.attention.bind(attrs, _views(inputs[0]), (_swap(y), lse), workspace)


@dataclass(frozen=True, slots=True)
class PackedAttentionGradKernel:
    """`packed_attention_grad`: attrs scale, causal. `attention_grad` computes it on views.

    `in_place` says whether that writes a part of the gradient of a head only after all reads of
    the parts of that head which lie there: dqkv may then lie over qkv.
    """

    name: str
    attention_grad: Kernel
    in_place: bool
    op: str = "packed_attention_grad"

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take what the kernel of attention_grad takes as views."""
        dy, qkv, y, lse = inputs
        operands = (by_head(dy), *parts_of(qkv), by_head(y), lse)
        needs = self.attention_grad.query(attrs, operands, parts_of(outputs[0]))
        if needs is None:
            return None
        is_possible = self.in_place and qkv.is_dense and outputs[0].is_dense
        return replace(needs, in_place=((0, 1),) if is_possible else ())

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the launch of attention_grad on views."""
        dy, qkv, y, lse = inputs
        operands = (_swap(dy), *_views(qkv), _swap(y), lse)
        return self.attention_grad.bind(attrs, operands, _views(outputs[0]), workspace)


def parts_of(qkv: Operand) -> tuple[Operand, ...]:
    """Return q, k and v as operands [batch, heads, T, width]."""
    batch, rows, _, heads, width = qkv.shape
    to_batch, to_row, to_part, to_head, to_next = qkv.strides_bytes
    type_ = TensorType(qkv.type.dtype, (batch, heads, rows, width))
    strides = (to_batch, to_head, to_row, to_next)
    return tuple([Operand(type_, qkv.offset_bytes + i * to_part, strides) for i in range(3)])


def by_head(y: Operand) -> Operand:
    """Return [batch, T, heads, width] as [batch, heads, T, width]."""
    batch, rows, heads, width = y.shape
    to_batch, to_row, to_head, to_next = y.strides_bytes
    type_ = TensorType(y.type.dtype, (batch, heads, rows, width))
    return Operand(type_, y.offset_bytes, (to_batch, to_head, to_row, to_next))


def _views(qkv: Array) -> tuple[Array, ...]:
    return tuple([_swap(qkv[:, :, index]) for index in range(3)])


def _swap(y: Array) -> Array:
    return y.swapaxes(1, 2)


PACKED_ATTENTION_KERNELS = (
    PackedAttentionKernel("numpy.packed_attention", AttentionKernel()),
    PackedAttentionGradKernel("numpy.packed_attention_grad", AttentionGradKernel(), in_place=False),
)
