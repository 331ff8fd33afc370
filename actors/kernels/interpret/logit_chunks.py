"""The chunks of logits of a linear layer: their scratch, and the calls that go over them.

The loss takes its exponentials block by block as `loss` does, first without the row's maximum. The
gradient of a row is exp(logits) times dloss / (N * sum of exp), with the exponentials that the loss
has taken: one per logit, where separate kernels take two. It is written over the logits and goes
into two more products, the rows of dx and a share of dweight.

numpy's product cannot add to its output. The first chunk writes dweight; the others add a product
of `PRODUCT_BYTES` at a time, so that scratch does not hold dweight twice.

All calls but those on a chunk's own rows work on the same scratch for every chunk, and are bound
once for each height of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from actors.kernels import scratch
from actors.kernels.indices import INDEX, as_index, index_pieces
from actors.kernels.interpret.blocks import cut, rows_per_block
from actors.kernels.interpret.rows import safe_sums, sum_is_safe
from actors.kernels.interpret.sums import (
    WIDE,
    SumScratch,
    column_sums,
    row_sums,
    sum_into,
    sum_pieces,
)
from actors.kernels.kernel import Operand, in_sequence
from actors.kernels.scratch import Piece
from actors.protocol import Array, Launch

PRODUCT_BYTES = 4 << 20
"""Bytes of a product that is added to dweight: between 1 and 8 MiB the time is the same, and the
fewer calls the better. [50257, 768], 960 rows in chunks of 160: 0.41 s; without adding, 0.39 s."""

T = TypeVar("T", Operand, Array)


@dataclass(frozen=True, slots=True)
class Roles(Generic[T]):
    """The operands of a call by what they are, types at compile time and arrays at load."""

    x: T
    weight: T
    bias: T | None
    labels: T
    dloss: T | None
    loss: T | None
    lse: T | None
    dx: T | None
    dweight: T | None
    dbias: T | None


@dataclass(frozen=True, slots=True)
class Extents:
    """What decides scratch and work: the extents of a call and which parts of it are asked for."""

    rows: int
    width: int
    classes: int
    chunk_rows: int
    dtype: np.dtype[np.generic]
    packs_weight: bool
    has_loss: bool
    has_gradients: bool
    adds_weight: bool
    adds_bias: bool

    @property
    def num_chunks(self) -> int:
        """How many chunks the rows make."""
        return -(-self.rows // self.chunk_rows)

    @property
    def product_rows(self) -> int:
        """How many classes a product has that is added to dweight."""
        fitting = PRODUCT_BYTES // max(self.width * self.dtype.itemsize, 1)
        return max(1, min(self.classes, fitting))

    def pieces(self) -> tuple[Piece, ...]:
        """Return scratch in the order of `Scratch`."""
        chunk, dtype = self.chunk_rows, self.dtype
        height = min(chunk, rows_per_block(self.classes, dtype.itemsize))
        block = height * self.classes if self.has_loss else 0
        product = (self.product_rows, self.width) if self.adds_weight else (0, 0)
        classes = self.classes if self.adds_bias else 0
        return (
            Piece((chunk, self.classes), dtype),
            Piece((chunk, self.width), dtype),
            Piece((self.classes, self.width) if self.packs_weight else (0, 0), dtype),
            Piece(product, dtype),
            *sum_pieces(chunk * classes, classes),
            Piece((chunk,), WIDE),
            Piece((), WIDE),
            Piece((), WIDE),
            Piece((block,), dtype),
            Piece((max(self.classes, chunk),), dtype),
            *[Piece((chunk,), dtype)] * 4,
            Piece((4,), dtype),
            Piece((chunk,), INDEX),
            Piece((chunk,), INDEX),
            *index_pieces(self.rows),
        )


class Scratch(NamedTuple):
    """The arrays of scratch; those of a chunk have `chunk_rows` rows."""

    logits: Array
    x: Array
    weight: Array
    product: Array
    wide: Array
    bias: Array
    bias_part: Array
    wide_ones: Array
    loss: Array
    loss_part: Array
    block: Array
    ones: Array
    lse: Array
    maxima: Array
    shares: Array
    picked: Array
    scalars: Array
    starts: Array
    places: Array
    labels: Array
    extremes: Array

    def scalar(self, index: int) -> Array:
        """Return a scalar of scratch: 0 partial loss, 1 dloss / N, 2 and 3 extremes of sums."""
        return self.scalars[index : index + 1].reshape(())


def over_chunks(s: Scratch, roles: Roles[Array], weight: Array, extents: Extents) -> list[Launch]:
    """Return the calls of all chunks; those on scratch alone are bound once per height."""
    calls: list[Launch] = []
    bound: dict[int, tuple[Launch, Launch]] = {}
    rows, step = extents.rows, extents.chunk_rows
    for start in range(0, rows, step):
        own = slice(start, min(start + step, rows))
        height = own.stop - own.start
        if height not in bound:
            chunk = s._replace(logits=s.logits[:height], x=s.x[:height])
            if extents.has_loss:
                made = _loss(chunk, roles, height)
            else:
                made = _gradient_of_logits(chunk, height)
            added = _add_gradients(chunk, roles, height)
            bound[height] = in_sequence((*_logits(chunk, roles, weight), *made)), added
        compute, add = bound[height]
        lse, logits = s.lse[:height], s.logits[:height]
        calls += [
            partial(np.copyto, s.x[:height], roles.x[own]),
            partial(np.add, s.labels[own], s.starts[:height], out=s.places[:height]),
        ]
        if roles.lse is not None and extents.has_gradients:
            calls.append(partial(np.copyto, lse, roles.lse[own]))
        calls.append(compute)
        if roles.lse is not None and extents.has_loss:
            calls.append(partial(np.copyto, roles.lse[own], lse))
        calls += _first_gradients(s, roles, height) if start == 0 else [add]
        if roles.dx is not None:
            calls.append(partial(np.matmul, logits, weight, out=roles.dx[own]))
    if roles.dbias is not None:
        calls.append(partial(np.copyto, roles.dbias, s.bias, casting="unsafe"))
    return calls


def _logits(s: Scratch, roles: Roles[Array], weight: Array) -> Iterator[Launch]:
    yield partial(np.matmul, s.x, weight.T, out=s.logits)
    if roles.bias is not None:
        yield partial(np.add, s.logits, roles.bias, out=s.logits)


def _loss(s: Scratch, roles: Roles[Array], height: int) -> list[Launch]:
    """Return the calls that add to the loss, fill lse, and make the gradient where it is wanted."""
    lse, picked, places = s.lse[:height], s.picked[:height], s.places[:height]
    flat = s.logits.reshape(-1)
    calls: list[Launch] = [partial(flat.take, places, out=picked, mode="clip")]
    limit = rows_per_block(s.logits.shape[1], s.logits.itemsize)
    operands = (s.logits, lse, s.maxima[:height], s.shares[:height])
    has_gradients = roles.dloss is not None
    for logits, sums, maxima, shares in cut(operands, 1, limit):
        calls.append(_log_sum_exp(s, logits, sums, maxima, shares if has_gradients else None))
    if roles.loss is not None:
        calls += [
            partial(np.subtract, lse, picked, out=picked),
            *sum_into(picked, s.scalar(0), s.loss_part, s.loss),
        ]
    return [*calls, *_subtract_labels(s, height)] if has_gradients else calls


def _log_sum_exp(
    s: Scratch, logits: Array, sums: Array, maxima: Array, shares: Array | None
) -> Launch:
    """Return the launch that fills `sums` and, with `shares`, puts softmax * dloss / N in place."""
    low, high = safe_sums(logits.dtype)
    t = scratch.window(s.block, logits.shape)
    is_safe = partial(sum_is_safe, sums, s.scalar(2), s.scalar(3))
    exponential = partial(np.exp, logits, out=t)
    total = row_sums(t, s.ones[: logits.shape[1]], sums)
    shift = (
        partial(np.maximum.reduce, logits, axis=-1, out=maxima),
        partial(np.subtract, logits, maxima[:, None], out=t),
        partial(np.exp, t, out=t),
        total,
    )
    spread: tuple[Launch, ...] = ()
    if shares is not None:
        spread = (
            partial(np.divide, s.scalar(1), sums, out=shares),
            partial(np.multiply, t, shares[:, None], out=logits),
        )
    plain: tuple[Launch, ...] = (*spread, partial(np.log, sums, out=sums))
    shifted: tuple[Launch, ...] = (*shift, *plain, partial(np.add, sums, maxima, out=sums))

    def launch() -> None:
        exponential()
        total()
        for call in plain if is_safe(low, high) else shifted:
            call()

    return launch


def _gradient_of_logits(s: Scratch, height: int) -> list[Launch]:
    """Return the calls that put (exp(logits - lse) - onehot(labels)) * dloss / N in place."""
    calls: list[Launch] = []
    limit = rows_per_block(s.logits.shape[1], s.logits.itemsize)
    for logits, lse in cut((s.logits, s.lse[:height]), 1, limit):
        calls += [
            partial(np.subtract, logits, lse[:, None], out=logits),
            partial(np.exp, logits, out=logits),
            partial(np.multiply, logits, s.scalar(1), out=logits),
        ]
    return [*calls, *_subtract_labels(s, height)]


def _subtract_labels(s: Scratch, height: int) -> tuple[Launch, ...]:
    places, picked, flat = s.places[:height], s.picked[:height], s.logits.reshape(-1)
    return (
        partial(flat.take, places, out=picked, mode="clip"),
        partial(np.subtract, picked, s.scalar(1), out=picked),
        partial(flat.put, as_index(places), picked, mode="clip"),
    )


def _first_gradients(s: Scratch, roles: Roles[Array], height: int) -> list[Launch]:
    """Return the calls that write dweight and dbias from the first chunk."""
    dlogits, calls = s.logits[:height], list[Launch]()
    if roles.dweight is not None:
        calls.append(partial(np.matmul, dlogits.T, s.x[:height], out=roles.dweight))
    if roles.dbias is not None:
        calls += [partial(s.wide_ones.fill, 1), partial(s.bias.fill, 0), *_add_bias(s, height)]
    return calls


def _add_bias(s: Scratch, height: int) -> list[Launch]:
    held = SumScratch(s.wide, s.bias, s.bias_part)
    return column_sums(s.logits[:height], 1, s.wide_ones, s.bias, held)


def _add_gradients(s: Scratch, roles: Roles[Array], height: int) -> Launch:
    """Return the launch that adds a further chunk to dweight and dbias."""
    calls: list[Launch] = []
    if roles.dweight is not None and len(s.product):
        for dlogits, total in cut((s.logits.T, roles.dweight), 1, len(s.product)):
            product = s.product[: len(total)]
            calls += [
                partial(np.matmul, dlogits, s.x, out=product),
                partial(np.add, total, product, out=total),
            ]
    if roles.dbias is not None:
        calls += _add_bias(s, height)
    return in_sequence(calls)
