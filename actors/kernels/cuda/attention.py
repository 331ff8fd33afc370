"""Attention and its gradient for any float, composed of products and rows (`attention_chunks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from actors.kernels.cuda.attention_chunks import NOWHERE, AttentionChunks, operands_of
from actors.kernels.cuda.attention_rows import have_heads, real_of
from actors.kernels.cuda.calls import DeviceCalls
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.views import DeviceView, PlacedView, on_device
from actors.kernels.interpret.attention_blocks import BlockExtents, extents_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operands, equal_operands


@dataclass(frozen=True, slots=True)
class CudaAttention:
    """`attention`: attrs scale, causal; with dropout p, key."""

    gpu: Gpu
    name: str = "cuda.attention"
    op: str = "attention"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every float; scratch is a chunk of scores and what its products need."""
        if not _is_taken(extents_of(attrs, inputs), inputs, outputs):
            return None
        run = AttentionChunks(self.gpu, attrs, _layouts(inputs), _layouts(outputs), None)
        run.forward()
        return run.needs()

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the calls, chunk by chunk."""
        return _calls(AttentionChunks.forward, self.gpu, attrs, (inputs, outputs), workspace)


@dataclass(frozen=True, slots=True)
class CudaAttentionGrad:
    """`attention_grad`: attrs scale, causal; with dropout p, key."""

    gpu: Gpu
    name: str = "cuda.attention_grad"
    op: str = "attention_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take every float; scratch is a chunk of scores, its products' and sums of gradients.

        dq may lie over dy, q or y, whose rows are done with when its own are written; dk and dv
        over k or v where they are added up in scratch.
        """
        if not _is_taken(extents_of(attrs, inputs, 1), inputs, outputs):
            return None
        run = AttentionChunks(self.gpu, attrs, _layouts(inputs), _layouts(outputs), None)
        run.backward()
        free = [(0, 4), (0, 1), (0, 0)]
        if inputs[0].type.dtype is not real_of(inputs[0].type.dtype):
            free += [(1, 2), (1, 3), (2, 3), (2, 2)]
        pairs = [pair for pair in free if pair in equal_operands(pair[0], outputs, inputs)]
        return replace(run.needs(), in_place=tuple(pairs))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return the calls, chunk by chunk, the last rows first: they see all keys."""
        return _calls(AttentionChunks.backward, self.gpu, attrs, (inputs, outputs), workspace)


def _calls(
    way: Callable[[AttentionChunks], DeviceCalls],
    gpu: Gpu,
    attrs: Attrs,
    operands: tuple[tuple[PlacedView, ...], tuple[PlacedView, ...]],
    workspace: DeviceView | None,
) -> DeviceCalls:
    """Return the calls of one way through the chunks, which tells first what scratch it wants."""
    inputs, outputs = map(on_device, operands)
    asked = AttentionChunks(gpu, attrs, inputs, outputs, None)
    way(asked)
    return way(AttentionChunks(gpu, attrs, inputs, outputs, asked.placed(workspace)))


def _is_taken(e: BlockExtents, inputs: Operands, outputs: Operands) -> bool:
    """Whether these are floats whose heads are few enough axes."""
    dtype = outputs[0].type.dtype
    return dtype.is_float and have_heads(operands_of(e, _layouts(inputs), _layouts(outputs)))


def _layouts(operands: Operands) -> tuple[DeviceView, ...]:
    return tuple([DeviceView(NOWHERE, x.type, x.strides_bytes) for x in operands])
