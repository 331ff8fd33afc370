"""Attention and its gradient for any float: products of the library, rows by our kernels.

A chunk is some rows of the queries of some heads with all keys that one of them sees; its scores
and probabilities are scratch (CHUNK_BYTES). So of a causal call nearly half of the products is
left out. The gradient computes the probabilities anew from lse and tail, in the chunks of the
forward pass: products of equal extents make the same scores to the bit. It adds up the gradients of
keys and values over the chunks, in float32 where they are narrower (Dao et al., 2022, appendix B).
Operands may lie in any way: heads cut out of a projection are read and written where they are.

What a query does not see is never looked at, but for the products with values (and keys, in the
gradient): there a weight of 0 meets it, and 0 * NaN is NaN. So those of a causal call go through
a copy without what is not finite, and `restored` adds what that left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from actors.kernels.common.attention_blocks import BlockExtents, extents_of
from actors.kernels.common.kernel import (
    Attrs,
    KernelNeeds,
    KernelPlan,
    Operands,
    Piece,
    equal_operands,
    integer,
    number,
    size_bytes,
)
from actors.kernels.common.strides import collapse_axes, cut
from actors.kernels.cuda.attention_rows import (
    AttentionRows,
    DropoutPlaces,
    Seen,
    have_heads,
    real_of,
)
from actors.kernels.cuda.calls import DeviceCall, DeviceCalls, LaunchCalls
from actors.kernels.cuda.kernel import (
    CudaPlan,
    DeviceView,
    Gpu,
    PlacedViews,
    Scratch,
    carve,
    on_device,
)
from actors.kernels.cuda.matmul import plan_product
from actors.kernels.cuda.movement import copy_calls, copy_ns, seen_as_array
from actors.machine.protocol import Array, Arrays
from compiler.contract.errors import InternalError
from compiler.contract.types import DType, TensorType, contiguous_strides, numpy_dtype

CHUNK_BYTES = 256 << 20
"""Scratch of a chunk, besides that of its products and the sums of the gradients."""

_STRIPS, _LEAST_ROWS = 4, 128
"""A causal mask hides 3/8 of the blocks of 4 strips, and 7/16 of those of 8. That saves less than
sums over more strips and more calls cost, as GPUs are described; few scores have half as many."""

NOWHERE = 1 << 20
"""An address for views of which only the layout is asked."""

_BYTES = np.dtype(np.uint8)
_PRODUCTS = "products"


class AttentionChunks:
    """The calls of one launch.

    Without scratch (`placed` is None) it finds out how much is needed, and how long it takes.
    """

    def __init__(
        self,
        gpu: Gpu,
        attrs: Attrs,
        inputs: tuple[DeviceView, ...],
        outputs: tuple[DeviceView, ...],
        placed: Mapping[str, int] | None,
    ) -> None:
        self._gpu = gpu
        self._outputs = outputs
        self._e = extents_of(attrs, inputs, int(_is_gradient(outputs)))
        self._arrays = operands_of(self._e, inputs, outputs)
        self._dropout = _dropout(self._e, attrs, inputs)
        self._first_head = 0
        self._dtype = inputs[0].dtype
        self._real = real_of(self._dtype)
        self._is_in_place = self._dtype is self._real
        """Whether probabilities may lie over scores."""
        self._scale = number(attrs, "scale")
        self._placed = placed
        # The library's comes first, for that is where scratch is aligned best: it wants 256 bytes.
        self._sizes = {_PRODUCTS: 0}
        self._duration_ns = 0.0
        self._times = 1
        """How many groups the calls that are timed stand for."""
        self._calls: list[DeviceCall] = []

    # -- scratch ---------------------------------------------------------------------------------

    def needs(self) -> KernelNeeds:
        """Return what all calls so far need."""
        return KernelNeeds(size_bytes(self._pieces()), duration_ns=self._duration_ns)

    def placed(self, workspace: DeviceView | None) -> Mapping[str, int]:
        """Return where everything of scratch lies."""
        return dict(zip(self._sizes, carve(workspace, self._pieces()), strict=True))

    def _pieces(self) -> tuple[Piece, ...]:
        return tuple([Piece((size,), _BYTES) for size in self._sizes.values()])

    def _at(self, name: str, dtype: DType, *shape: int) -> DeviceView:
        """Return a dense tensor in the scratch of a name."""
        type_ = TensorType(dtype, shape)
        self._sizes[name] = max(self._sizes.get(name, 0), type_.size_bytes)
        address = NOWHERE if self._placed is None else self._placed[name] or NOWHERE
        return DeviceView(address, type_, contiguous_strides(shape, dtype.itemsize))

    # -- cuts ------------------------------------------------------------------------------------

    def _strips(self) -> list[range]:
        """Return the rows of the chunks."""
        e = self._e
        most = max(1, CHUNK_BYTES // max(1, e.columns * self._score_bytes))
        # Where all scores fit into scratch, fewer strips: calls then cost more than hidden blocks
        # save.
        all_bytes = e.heads * e.rows * e.columns * self._score_bytes
        strips = _STRIPS if all_bytes > CHUNK_BYTES else _STRIPS // 2
        rows = max(_LEAST_ROWS, -(-e.rows // strips)) if e.causal else e.rows
        rows = max(1, min(rows, most, e.rows))
        return [range(first, min(first + rows, e.rows)) for first in range(0, e.rows, rows)]

    def _groups(self, strips: list[range]) -> Iterator[Arrays]:
        """Yield the operands of as many heads as scratch holds a strip of.

        Where only time and scratch are asked for, groups that lie alike are yielded once.
        """
        e = self._e
        head_bytes = len(strips[0]) * e.columns * self._score_bytes
        head_bytes += 2 * (e.rows + e.columns) * (e.width + e.out) * self._dtype.itemsize
        limit = max(1, CHUNK_BYTES // max(1, head_bytes))
        groups = cut(self._arrays, self._arrays[0].ndim - 2, limit)
        if self._placed is not None:
            for group in groups:
                yield group
                # Dropout numbers elements through all heads, whatever group they are in.
                self._first_head += math.prod(group[0].shape[:-2])
            return
        forms = [tuple([(x.shape, x.strides) for x in group]) for group in groups]
        # Groups of one form take the same time and scratch: one is walked, and counted so often.
        times = Counter(forms)
        for form, group in zip(forms, groups, strict=True):
            self._times = times.pop(form, 0)
            if self._times:
                yield group

    @property
    def _score_bytes(self) -> int:
        """Bytes of a score and of what becomes of it: in the gradient, which has it twice."""
        narrow = 0 if self._is_in_place else self._dtype.itemsize
        return 2 * (self._real.itemsize + narrow) + self._e.is_dropped

    def _heads(
        self, used: Sequence[Array], masks: Sequence[Array], batch: tuple[int, ...]
    ) -> AttentionRows:
        mask = masks[0] if masks else None
        return AttentionRows(self._gpu, self._dtype, used, batch, mask, self._dropout)

    def _seen(self, heads: AttentionRows, rows: range, shape: tuple[int, ...]) -> Seen:
        """Return what some rows see; where weights are dropped, draw for a chunk of a shape."""
        count = self._e.visible(rows.start)
        if not self._e.is_dropped:
            return Seen(rows, count)
        kept_mask = self._at("kept", DType.UINT8, *shape)
        self._add(heads.kept(kept_mask, self._first_head, rows.start), kept_mask.type.size_bytes)
        return Seen(rows, count, kept_mask)

    # -- calls -----------------------------------------------------------------------------------

    def forward(self) -> DeviceCalls:
        """Return the calls of attention."""
        e = self._e
        if not e.heads or not e.rows:
            return ()
        strips = self._strips()
        for q, k, v, y, lse, tail, *masks in self._groups(strips):
            q, k, target = self._even("q", q), self._even("k", k), self._even_target("y", y)
            heads = self._heads((q, k, v, y, target, lse, tail), masks, lse.shape[:-1])
            values, flags = self._finite(heads, "v", v)
            for rows in strips:
                i, visible = slice(rows.start, rows.stop), slice(0, e.visible(rows.stop - 1))
                shape = (*q.shape[:-2], len(rows), visible.stop)
                scores = self._at("scores", self._real, *shape)
                p = scores if self._is_in_place else self._at("p", self._dtype, *shape)
                self._multiply(
                    self._view(q[..., i, :]), self._view(_turned(k[..., visible, :])), scores
                )
                seen = self._seen(heads, rows, shape)
                args = scores, p, (lse[..., i], tail[..., i]), seen, self._scale
                self._add(heads.probabilities(*args), scores.type.size_bytes + p.type.size_bytes)
                out = target[..., i, :]
                self._multiply(p, self._view(values[..., visible, :]), self._view(out))
                if flags is not None:
                    self._add(heads.restored(v, out, p, flags, seen.count), flags.type.size_bytes)
            self._copy(y, target)
        return tuple(self._calls)

    def backward(self) -> DeviceCalls:
        """Return the calls of its gradient."""
        e = self._e
        if not e.heads or not e.rows:
            return tuple([call for out in self._outputs for call in self._zeros(out)])
        strips = self._strips()
        for dy, q, k, v, y, lse, tail, dq, dk, dv, *masks in self._groups(strips):
            inputs = [self._even(name, x) for name, x in (("dy", dy), ("q", q), ("k", k), ("v", v))]
            target = self._even_target("dq", dq)
            operands = (*inputs, k, y, lse, tail, target)
            heads = self._heads(operands, masks, lse.shape[:-1])
            keys, _ = self._finite(heads, "finite k", k)
            sums = self._sums("dk", dk), self._sums("dv", dv)
            for rows in reversed(strips):
                # The first strip of this order overwrites, so that sums need no fill before it.
                beta = 0.0 if rows is strips[-1] else 1.0
                operands_of_rows = (*inputs, y, lse, tail)
                self._strip_backward(heads, rows, operands_of_rows, (keys, target), sums, beta)
            self._copy(dq, target)
            for total, out in zip(sums, (dk, dv), strict=True):
                self._round(heads, total, out)
        return tuple(self._calls)

    def _strip_backward(
        self,
        heads: AttentionRows,
        rows: range,
        inputs: Arrays,
        ends: tuple[Array, Array],
        sums: tuple[DeviceView, DeviceView],
        beta: float,
    ) -> None:
        """Add the calls of some rows: what they give to keys and values, and then their dq.

        In this order dq may lie over dy, q or y: of these rows nobody reads more.
        """
        dy, q, k, v, y, lse, tail = inputs
        keys, dq = ends
        i, visible = slice(rows.start, rows.stop), slice(0, self._e.visible(rows.stop - 1))
        shape = (*q.shape[:-2], len(rows), visible.stop)
        scores, products = [self._at(name, self._real, *shape) for name in ("scores", "dp")]
        p, ds = scores, products
        if not self._is_in_place:
            p, ds = [self._at(name, self._dtype, *shape) for name in ("p", "ds")]
        queries, slopes = self._view(q[..., i, :]), self._view(dy[..., i, :])
        self._multiply(queries, self._view(_turned(k[..., visible, :])), scores)
        self._multiply(slopes, self._view(_turned(v[..., visible, :])), products)
        blocks = scores, products, p, ds
        rows_of = dy[..., i, :], y[..., i, :], lse[..., i], tail[..., i]
        calls = heads.slopes(blocks, rows_of, self._seen(heads, rows, shape), self._scale)
        self._add(calls, sum([block.type.size_bytes for block in blocks]))
        for left, right, total in ((ds, queries, sums[0]), (p, slopes, sums[1])):
            part = _view(seen_as_array(total)[..., visible, :], total.dtype)
            self._multiply(self._view(_turned(seen_as_array(left))), right, part, beta)
        self._multiply(ds, self._view(keys[..., visible, :]), self._view(dq[..., i, :]))

    def _finite(self, heads: AttentionRows, name: str, x: Array) -> tuple[Array, DeviceView | None]:
        """Return rows for a product with what the mask makes 0, and where some were left out."""
        if not self._e.causal or not x.shape[-1]:
            return self._even(name, x), None
        copy = self._at(name, self._dtype, *x.shape)
        flags = self._at(f"flags of {name}", DType.INT32, heads.count, heads.num_tiles(x.shape[-2]))
        self._add(heads.finite(x, copy, flags), 2 * copy.type.size_bytes)
        return seen_as_array(copy), flags

    def _even(self, name: str, x: Array) -> Array:
        """Return an operand whose heads are one step apart: one call multiplies all of them."""
        even = self._even_target(name, x)
        self._copy(even, x)
        return even

    def _even_target(self, name: str, x: Array) -> Array:
        """Return an array whose heads are one step apart, and rows dense: itself, or scratch."""
        heads = collapse_axes(x.shape[:-2], (x.strides[:-2],), in_order=True)
        is_even = x.strides[-1] == x.itemsize or x.shape[-1] == 1
        if not x.size or (len(heads) <= 1 and is_even):
            return x
        return seen_as_array(self._at(f"even {name}", self._dtype, *x.shape))

    def _sums(self, name: str, out: Array) -> DeviceView:
        """Return where the gradient of keys or values is added up."""
        if self._is_in_place:
            return self._view(self._even_target(name, out))
        return self._at(name, self._real, *out.shape)

    def _round(self, heads: AttentionRows, sums: DeviceView, out: Array) -> None:
        """Add the calls that bring sums to where they belong, in their type."""
        if self._is_in_place:
            self._copy(out, seen_as_array(sums))
        elif out.size:
            target = self._view(out)
            dense = target if target.is_dense else self._at("scores", self._dtype, *out.shape)
            self._add(heads.rounded(sums, dense), sums.type.size_bytes + dense.type.size_bytes)
            self._copy(out, seen_as_array(dense))

    def _copy(self, target: Array, source: Array) -> None:
        # `_even` gives the operand itself where it lies well: nothing to copy then.
        if target.ctypes.data != source.ctypes.data or target.strides != source.strides:
            self._duration_ns += self._times * copy_ns(self._gpu, target, source)
            self._calls += copy_calls(self._gpu, target, source)

    def _zeros(self, out: DeviceView) -> DeviceCalls:
        zero = np.broadcast_to(np.zeros((), numpy_dtype(out.dtype)), out.shape)
        return copy_calls(self._gpu, seen_as_array(out), zero)

    def _multiply(self, a: DeviceView, b: DeviceView, out: DeviceView, beta: float = 0.0) -> None:
        plan = plan_product(self._gpu, a.as_operand, b.as_operand, out.as_operand)
        if plan is None:
            raise InternalError(f"no product takes {a} and {b} to {out}")
        again = self._gpu.bytes_ns(out.type.size_bytes) if beta else 0.0
        self._duration_ns += self._times * (plan.duration_ns() + again)
        scratch = self._at(_PRODUCTS, DType.UINT8, size_bytes(plan.pieces))
        if self._placed is not None:
            self._calls += plan.calls((a, b, out), carve(scratch, plan.pieces), beta)

    def _add(self, calls: DeviceCalls, size_bytes: int) -> None:
        self._duration_ns += self._times * (self._gpu.call_ns + self._gpu.bytes_ns(size_bytes))
        self._calls += calls

    def _view(self, array: Array) -> DeviceView:
        return _view(array, self._dtype)


def operands_of(
    e: BlockExtents, inputs: tuple[DeviceView, ...], outputs: tuple[DeviceView, ...]
) -> Arrays:
    """Return what has heads: inputs, outputs, and the mask in the shape of all scores."""
    first = 7 if _is_gradient(outputs) else 3
    dense = [seen_as_array(x) for x in (*inputs[:first], *outputs)]
    masks = [seen_as_array(x) for x in inputs[first : first + e.is_masked]]
    whole = (*dense[0].shape[:-2], e.rows, e.columns)
    return *dense, *[np.broadcast_to(mask, whole) for mask in masks]


def _is_gradient(outputs: tuple[DeviceView, ...]) -> bool:
    """Whether outputs are three gradients; lse and tail have an axis fewer than y."""
    return len(outputs[-1].shape) == len(outputs[0].shape)


def _dropout(e: BlockExtents, attrs: Attrs, inputs: tuple[DeviceView, ...]) -> DropoutPlaces | None:
    if not e.is_dropped:
        return None
    seed, step, *firsts = [x.address for x in inputs[-2 - e.is_numbered :]]
    key = integer(attrs, "key")
    return DropoutPlaces(seed, step, key, number(attrs, "p"), e.rows, e.columns, *firsts)


def _view(array: Array, dtype: DType) -> DeviceView:
    return DeviceView(int(array.ctypes.data), TensorType(dtype, array.shape), array.strides)


def _turned(array: Array) -> Array:
    """Return matrices with rows and columns exchanged."""
    return array.swapaxes(-1, -2)


def plan_attention(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `attention`: attrs scale, causal; with dropout p, key.

    It takes every float; scratch is a chunk of scores and what its products need.
    """
    return _planned(gpu, attrs, inputs, outputs, AttentionChunks.forward, ())


def plan_gradient(gpu: Gpu, attrs: Attrs, inputs: Operands, outputs: Operands) -> CudaPlan | None:
    """Plan `attention_grad`: attrs scale, causal; with dropout p, key.

    It takes every float; scratch is a chunk of scores, its products' and sums of gradients.

    dq may lie over dy, q or y, whose rows are done with when its own are written; dk and dv
    over k or v where they are added up in scratch.
    """
    # (output, input): dq over y, q or dy.
    free = [(0, 4), (0, 1), (0, 0)]
    if inputs[0].type.dtype is not real_of(inputs[0].type.dtype):
        free += [(1, 2), (1, 3), (2, 3), (2, 2)]
    pairs = tuple([pair for pair in free if pair in equal_operands(pair[0], outputs, inputs)])
    return _planned(gpu, attrs, inputs, outputs, AttentionChunks.backward, pairs)


def _planned(
    gpu: Gpu,
    attrs: Attrs,
    inputs: Operands,
    outputs: Operands,
    way: Callable[[AttentionChunks], DeviceCalls],
    in_place: tuple[tuple[int, int], ...],
) -> CudaPlan | None:
    """Return the plan of one way through the chunks, which tells first what scratch it wants.

    None for what are no floats, or heads of too many axes.
    """
    layouts, places = (_layouts(inputs), _layouts(outputs)), int(way is AttentionChunks.backward)
    heads = operands_of(extents_of(attrs, inputs, places), *layouts)
    if not (outputs[0].type.dtype.is_float and have_heads(heads)):
        return None
    dry_run = AttentionChunks(gpu, attrs, *layouts, None)
    way(dry_run)

    def bind(inputs: PlacedViews, outputs: PlacedViews, workspace: Scratch) -> LaunchCalls:
        views = on_device(inputs), on_device(outputs)
        return way(AttentionChunks(gpu, attrs, *views, dry_run.placed(workspace)))

    return KernelPlan(replace(dry_run.needs(), in_place=in_place), bind)


def _layouts(operands: Operands) -> tuple[DeviceView, ...]:
    return tuple([DeviceView(NOWHERE, x.type, x.strides_bytes) for x in operands])
