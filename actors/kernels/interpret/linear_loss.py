"""Softmax cross-entropy on top of a linear layer, a chunk of rows of the logits at a time.

One kernel class serves three ops: the loss, its gradients, and both in one pass over the logits.
Every chunk reads the weight once per product, so chunks should have rows enough to make up for
that; how many is the compiler's choice. What is done with a chunk is in `logit_chunks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from actors.kernels import cost, scratch
from actors.kernels.attributes import flag, integer
from actors.kernels.indices import checked, fill_range
from actors.kernels.interpret.logit_chunks import Extents, Roles, Scratch, T, over_chunks
from actors.kernels.interpret.matmul import Window
from actors.kernels.interpret.rows import are_row_floats
from actors.kernels.interpret.sums import WIDE
from actors.kernels.kernel import Attrs, KernelNeeds, Operand, equal_operands, in_sequence
from actors.kernels.work import CALLS_PER_PRODUCT, Pass, Product, Work, item_weight, over_blocks
from actors.protocol import Array, Launch

_GRADIENTS = ("dx", "dweight", "dbias")


@dataclass(frozen=True, slots=True)
class LinearLossKernel:
    """The loss of x @ weight.T + bias, its gradients, or both in one pass over the logits."""

    name: str
    op: str
    has_loss: bool
    has_gradients: bool

    def query(
        self, attrs: Attrs, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]
    ) -> KernelNeeds | None:
        """Take float32 and float64 with dense outputs. dx may lie over x.

        Not with as many rows as classes, though: x could be the weight as well, which the next
        chunk reads again.
        """
        roles = self._roles(attrs, inputs, outputs)
        operands = [roles.x, roles.weight, *[x for x in (roles.bias, roles.lse) if x is not None]]
        if not (are_row_floats(tuple(operands)) and roles.labels.type.dtype.is_integer):
            return None
        if not all([out.is_dense for out in outputs]):
            return None
        weight = roles.weight
        window = Window(weight.shape, weight.strides_bytes, weight.dtype)
        extents = self._extents(attrs, roles, packs_weight=not window.is_blas_matrix)
        pairs: tuple[tuple[int, int], ...] = ()
        if roles.dx is not None and extents.rows != extents.classes:
            place, given = int(self.has_loss), 1
            pairs = tuple([p for p in equal_operands(place, outputs, inputs) if p[1] == given])
        size = scratch.size_bytes(extents.pieces())
        return cost.needs(inputs, outputs, _work(extents, roles), size, pairs)

    def bind(
        self,
        attrs: Attrs,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        workspace: Array | None,
    ) -> Launch:
        """Return the check of the labels, then the launch over chunks of rows."""
        roles = self._roles(attrs, inputs, outputs)
        weight = roles.weight
        window = Window(weight.shape, weight.strides, weight.dtype)
        extents = self._extents(attrs, roles, packs_weight=not window.is_blas_matrix)
        s = Scratch(*scratch.carve(workspace, extents.pieces()))
        rows = np.array(extents.rows, extents.dtype)
        calls: list[Launch] = [
            checked("label", roles.labels, extents.classes, s.labels, s.extremes),
            *fill_range(s.starts, extents.classes),
            partial(s.ones.fill, 1),
        ]
        if extents.packs_weight:
            calls.append(partial(np.copyto, s.weight, weight))
            weight = s.weight
        if roles.dloss is not None:
            calls.append(partial(np.divide, roles.dloss, rows, out=s.scalar(1)))
        if roles.loss is not None:
            calls.append(partial(s.loss.fill, 0))
        calls += over_chunks(s, roles, weight, extents)
        if roles.loss is not None:
            calls.append(partial(np.divide, s.loss, np.array(extents.rows, WIDE), out=s.loss))
            calls.append(partial(np.copyto, roles.loss, s.loss, casting="unsafe"))
        return in_sequence(calls)

    def _roles(self, attrs: Attrs, inputs: tuple[T, ...], outputs: tuple[T, ...]) -> Roles[T]:
        given, made = list(inputs), list(outputs)
        dloss = given.pop(0) if self.has_gradients else None
        loss = made.pop(0) if self.has_loss else None
        lse = None
        if not self.has_loss:
            lse = given.pop()
        elif not self.has_gradients:
            lse = made.pop()
        bias = given[2] if len(given) == 4 else None
        wanted = [n for n in _GRADIENTS if self.has_gradients and flag(attrs, n)]
        found = dict(zip(wanted, made, strict=True))
        dx, dweight, dbias = [found.get(name) for name in _GRADIENTS]
        return Roles(given[0], given[1], bias, given[-1], dloss, loss, lse, dx, dweight, dbias)

    def _extents(self, attrs: Attrs, roles: Roles[T], *, packs_weight: bool) -> Extents:
        (rows, width), (classes, _) = roles.x.shape, roles.weight.shape
        chunk_rows = min(integer(attrs, "chunk_rows"), rows)
        return Extents(
            rows,
            width,
            classes,
            chunk_rows,
            roles.x.dtype,
            packs_weight,
            self.has_loss,
            self.has_gradients,
            adds_weight=roles.dweight is not None and chunk_rows < rows,
            adds_bias=roles.dbias is not None,
        )


def _work(extents: Extents, roles: Roles[Operand]) -> Work:
    """Return passes over all logits, the products of every chunk, and the sums of dweight."""
    rows, width, classes = extents.rows, extents.width, extents.classes
    item, chunks = extents.dtype.itemsize, extents.num_chunks
    weight = item_weight(item)
    products = [Product(weight * chunks, extents.chunk_rows, classes, width)]
    if extents.has_loss:
        products.append(Product(weight, rows, 1, classes))
    if roles.dx is not None:
        products.append(Product(weight * chunks, extents.chunk_rows, width, classes))
    added = 0.0
    calls = 12.0 * chunks
    if roles.dweight is not None:
        pieces = -(-classes // extents.product_rows)
        products.append(Product(weight * chunks, classes, width, extents.chunk_rows))
        calls += (CALLS_PER_PRODUCT + 1) * (chunks - 1) * pieces
        added = (chunks - 1.0) * classes * width * item
    simple = {(True, True): 1, (True, False): 0, (False, True): 2}
    over = over_blocks(
        rows * classes,
        item,
        {
            Pass.EXP: 1,
            Pass.SIMPLE: simple[extents.has_loss, extents.has_gradients],
            Pass.PLAIN: 0 if roles.bias is None else 1,
        },
        small_calls=6,
        loops=rows,
    )
    passes = (*over.passes, (Pass.PLAIN, added))
    return Work(over.calls + calls, over.loops, passes, tuple(products))


LINEAR_LOSS_KERNELS = (
    LinearLossKernel("numpy.linear_cross_entropy", "linear_cross_entropy", True, False),
    LinearLossKernel("numpy.linear_cross_entropy_grad", "linear_cross_entropy_grad", False, True),
    LinearLossKernel("numpy.linear_cross_entropy_train", "linear_cross_entropy_train", True, True),
)
