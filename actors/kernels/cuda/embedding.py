"""Rows of a table by integer id, and the gradient of the table, on a GPU (`embedding.cuh`).

A bad id addresses nothing: it is reported, and its row is zeros. The gradient does not scatter with
atomics, which would add in an order of their own; ids are sorted and their runs added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.kernels.attributes import integer
from actors.kernels.axes import MAX_OUTER, walk
from actors.kernels.cuda.calls import DeviceCalls, FillBytes, RunKernel
from actors.kernels.cuda.gpu import Gpu
from actors.kernels.cuda.indices import are_ids, ids_words, places_words, status_of
from actors.kernels.cuda.row_sums import BLOCK, sums_of, text_of_ids
from actors.kernels.cuda.views import DeviceView, PlacedView, carve, on_device
from actors.kernels.indices import axes_of
from actors.kernels.kernel import Attrs, KernelNeeds, Operands
from actors.kernels.scratch import size_bytes
from compiler.errors import InternalError

_UNITS = (16, 8, 4, 2)
_MAX_TEAM_BITS = 5
_GATHER_STATUS, _LAST_STATUS = 18, 17
"""The words of NAME_gather_arguments and NAME_last_arguments that hold the status cell."""


@dataclass(frozen=True, slots=True)
class CudaEmbedding:
    """`embedding`(weight [V, D], ids) -> ids.shape + (D,). Tables of any type, laid out anyhow."""

    gpu: Gpu
    name: str = "cuda.embedding"
    op: str = "embedding"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take integer ids; no scratch."""
        (_, ids), (out,) = inputs, outputs
        axes = walk(out.shape[:-1], (out.strides_bytes[:-1],), in_order=True)
        if not are_ids(ids) or len(axes) > MAX_OUTER:
            return None
        moved = 2.0 * out.type.size_bytes + ids.type.size_bytes
        return KernelNeeds(duration_ns=self.gpu.call_ns + self.gpu.bytes_ns(moved))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return one call, in which a team of threads copies a row."""
        (weight, ids), (out,) = on_device(inputs), on_device(outputs)
        num = ids.type.num_elements
        if not num:
            return ()
        rows, columns = weight.shape
        unit, steps = _units(weight, out)
        units = columns * weight.dtype.itemsize // unit
        team_bits = min(_MAX_TEAM_BITS, max(units - 1, 0).bit_length())
        words = (
            *ids_words(ids),
            *(weight.address, out.address, 0),
            *(rows, weight.strides_bytes[0], steps[0]),
            *places_words(out.shape[:-1], out.strides_bytes[:-1]),
            *(steps[1], units, unit, team_bits),
        )
        text, status = (
            text_of_ids(),
            status_of(_GATHER_STATUS, "id", ids.type, rows, axes_of(attrs)),
        )
        blocks = -(-(num << team_bits) // BLOCK)
        return (RunKernel(text, text.kernels[0], blocks, BLOCK, words, status=status),)


def _units(weight: DeviceView, out: DeviceView) -> tuple[int, tuple[int, int]]:
    """Return the bytes that a thread copies at once, and its steps in table and output."""
    item, columns = weight.dtype.itemsize, weight.shape[1]
    steps = weight.strides_bytes[1], out.strides_bytes[-1]
    if columns > 1 and steps != (item, item):
        return item, steps
    lie = (weight.address, out.address, columns * item, *weight.strides_bytes[:1])
    lie += out.strides_bytes[:-1]
    unit = next((unit for unit in _UNITS if not any([at % unit for at in lie])), 1)
    return unit, (unit, unit)


@dataclass(frozen=True, slots=True)
class CudaEmbeddingGrad:
    """`embedding_grad`(dy, ids) -> [rows, D]: row r is the sum of dy where ids is r; attrs rows."""

    gpu: Gpu
    name: str = "cuda.embedding_grad"
    op: str = "embedding_grad"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take floats and a dense output; scratch is sorted ids, and sums of pieces of runs."""
        (dy, ids), (out,) = inputs, outputs
        sums = sums_of(dy, ids, integer(attrs, "rows"))
        if sums is None or not out.is_dense:
            return None
        fill = self.gpu.call_ns + self.gpu.bytes_ns(out.type.size_bytes)
        duration_ns = fill + sums.duration_ns(self.gpu, dy.type.dtype.itemsize)
        return KernelNeeds(size_bytes(sums.pieces), duration_ns=duration_ns)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return a fill with zeros, the sort of the ids, and the sums."""
        (dy, ids), (out,) = on_device(inputs), on_device(outputs)
        sums = sums_of(dy.as_operand, ids.as_operand, integer(attrs, "rows"), axes_of(attrs))
        if sums is None:
            raise InternalError(f"{self.name} is bound to what it does not take")
        calls = sums.calls(carve(workspace, sums.pieces), dy, ids, out.address, 0)
        size = out.type.size_bytes
        return (FillBytes(out.address, 0, size), *calls) if size else calls


@dataclass(frozen=True, slots=True)
class CudaLastPlace:
    """`last_place`(ids) -> [rows] int32: the last place of each id, or -1; attrs rows."""

    gpu: Gpu
    name: str = "cuda.last_place"
    op: str = "last_place"

    def query(self, attrs: Attrs, inputs: Operands, outputs: Operands) -> KernelNeeds | None:
        """Take integer ids and a dense output; no scratch."""
        (ids,), (out,) = inputs, outputs
        if not (are_ids(ids) and out.is_dense):
            return None
        moved = float(out.type.size_bytes + ids.type.size_bytes)
        return KernelNeeds(duration_ns=2 * self.gpu.call_ns + self.gpu.bytes_ns(moved))

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[PlacedView, ...],
        outputs: tuple[PlacedView, ...],
        workspace: DeviceView | None,
    ) -> DeviceCalls:
        """Return a fill with -1, and one call with a thread for each id."""
        (ids,), (out,) = on_device(inputs), on_device(outputs)
        rows, num = out.type.num_elements, ids.type.num_elements
        calls: DeviceCalls = (FillBytes(out.address, 0xFF, out.type.size_bytes),) if rows else ()
        if not num:
            return calls
        text, status = text_of_ids(), status_of(_LAST_STATUS, "id", ids.type, rows, axes_of(attrs))
        words = (*ids_words(ids), out.address, 0, rows)
        blocks = -(-num // BLOCK)
        return (*calls, RunKernel(text, text.kernels[2], blocks, BLOCK, words, status=status))
