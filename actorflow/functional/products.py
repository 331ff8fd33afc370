"""Products of vectors, matrices and tensors, down to matrix products over broadcast batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actorflow.functional.arranging import diagonal, roll
from actorflow.tensor.literals import checked_number, checked_size, with_numpy_names
from actorflow.tensor.op_math import in_float32
from actorflow.tensor.tensor import Operand, Tensor, apply, as_tensor, checked_axis, integers
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError
from compiler.ops.primitives.matmul import MATMUL

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "cross",
    "dot",
    "einsum",
    "matmul",
    "mm",
    "mv",
    "outer",
    "tensordot",
]


def matmul(a: Operand, b: Operand) -> Tensor:
    """Return a @ b: of the last two axes, over all before them, which broadcast.

    A vector on the left is one row, on the right one column, and the result lacks that axis.
    """
    a, b = as_tensor(a), as_tensor(b)
    if not a.ndim or not b.ndim:
        raise CompileError(f"{find_source()}: matmul needs axes to sum over: {a.type}, {b.type}")
    # One large product in place of a batch of small ones with the same right side.
    if a.ndim > 2 and b.ndim == 2 and a.shape[-1] == b.shape[0]:
        # All leading axes become the rows of one product, which epilogues are fused with.
        y = apply(MATMUL, a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b)
        return y.reshape(*a.shape[:-1], b.shape[-1])
    left = a.reshape(1, a.shape[0]) if a.ndim == 1 else a
    right = b.reshape(b.shape[0], 1) if b.ndim == 1 else b
    y = apply(MATMUL, left, right)
    rows = y.shape[-2:-1] if a.ndim > 1 else ()
    columns = y.shape[-1:] if b.ndim > 1 else ()
    return y.reshape(*y.shape[:-2], *rows, *columns) if 1 in (a.ndim, b.ndim) else y


def _of_ranks(name: str, a: Tensor, b: Tensor, ranks: tuple[int, int]) -> Tensor:
    a, b = as_tensor(a), as_tensor(b)
    if (a.ndim, b.ndim) != ranks:
        raise CompileError(
            f"{find_source()}: {name} needs tensors of rank {ranks[0]} and {ranks[1]}, got {a.type}"
            f" and {b.type}"
        )
    return matmul(a, b)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two vectors, a scalar."""
    return _of_ranks("dot", a, b, (1, 1))


def mv(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix times a vector."""
    return _of_ranks("mv", a, b, (2, 1))


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a matrix times a matrix."""
    return _of_ranks("mm", a, b, (2, 2))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of matrices [B, M, K] and [B, K, N]."""
    return _of_ranks("bmm", a, b, (3, 3))


def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta * x + alpha * (a @ b) of matrices."""
    return _added(x, mm(a, b), beta, alpha)


def baddbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """Return beta * x + alpha * (a @ b) of matrices [B, M, K] and [B, K, N]."""
    return _added(x, bmm(a, b), beta, alpha)


def _added(x: Tensor, product: Tensor, beta: float, alpha: float) -> Tensor:
    """Leave x out where beta is 0, so that what is infinite in it does no harm."""
    factor, share = checked_number(alpha, "alpha"), checked_number(beta, "beta")
    scaled = product if factor == 1.0 else product * factor
    if share == 0.0:
        return scaled
    return scaled + (x if share == 1.0 else x * share)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of every element of one vector and every element of another."""
    a, b = as_tensor(a), as_tensor(b)
    if (a.ndim, b.ndim) != (1, 1):
        raise CompileError(f"{find_source()}: outer needs vectors, got {a.type} and {b.type}")
    return a.reshape(-1, 1) * b


@with_numpy_names
@in_float32
def cross(a: Tensor, b: Tensor, dim: int | None = None) -> Tensor:
    """Return the cross product along an axis of extent 3; other axes broadcast.

    Without `dim` it is the first such axis of a, as in torch; numpy takes the last, -1.
    """
    a, b = as_tensor(a), as_tensor(b)
    if dim is None:
        # Counted from the end, since b may have fewer axes.
        dim = next((i - a.ndim for i, n in enumerate(a.shape) if n == 3), -1)
    axis, other = checked_axis(a, dim), checked_axis(b, dim)
    if (a.shape[axis], b.shape[other]) != (3, 3):
        raise CompileError(
            f"{find_source()}: cross needs extents of 3 along axis {dim}, got {a.type}, {b.type}"
        )
    one = roll(a, -1, axis) * roll(b, -2, other)
    return one - roll(a, -2, axis) * roll(b, -1, other)


def tensordot(a: Tensor, b: Tensor, dims: int | Sequence[Sequence[int]] = 2) -> Tensor:
    """Return the sum of products over the last `dims` axes of a and the first of b.

    Or over pairs of axes: ([axes of a], [axes of b]).
    """
    a, b = as_tensor(a), as_tensor(b)
    if isinstance(dims, Sequence):
        if len(dims) != 2:
            raise CompileError(f"{find_source()}: tensordot needs axes of a and of b, got {dims!r}")
        of_a = [checked_axis(a, axis) for axis in integers(dims[0], what="an axis")]
        of_b = [checked_axis(b, axis) for axis in integers(dims[1], what="an axis")]
    else:
        count = checked_size(dims, "dims of tensordot")
        if not 0 <= count <= min(a.ndim, b.ndim):
            raise CompileError(
                f"{find_source()}: tensordot over {count} axes of {a.type} and {b.type}"
            )
        of_a, of_b = list(range(a.ndim - count, a.ndim)), list(range(count))
    if [a.shape[i] for i in of_a] != [b.shape[i] for i in of_b]:
        raise CompileError(
            f"{find_source()}: tensordot needs equal extents of axes {of_a} of {a.type} and {of_b}"
            f" of {b.type}"
        )
    number = dict(zip(of_b, of_a, strict=True))
    # Axes that are summed over have one number in both; those of b alone come after a's.
    names = [number.get(i, a.ndim + i) for i in range(b.ndim)]
    axes = [i for i in range(a.ndim) if i not in of_a] + [n for n in names if n >= a.ndim]
    return _summed(*_contracted((a, list(range(a.ndim))), (b, names), set(axes)), axes)


_Named = tuple[Tensor, list[int]]
"""A tensor with a number for each axis; those of equal numbers go together."""


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Return sums of products by Einstein's convention: "bij,bjk->bik".

    A letter is an axis, and `...` are any number of them, which broadcast. Those that the result
    lacks are summed over; without an arrow it has `...` and then what occurs once, by the alphabet.
    Operands are taken from left to right.
    """
    operands = tuple([as_tensor(operand) for operand in operands])
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    text = _spelled_out(text, operands)
    sides = text.split("->")
    terms = sides[0].split(",")
    letters = "".join(terms)
    target = sides[1] if len(sides) == 2 else _once(letters)
    is_right = len(sides) <= 2 and len(terms) == len(operands) and bool(operands)
    is_right = is_right and (letters + target).isalpha() | (not letters + target)
    if not is_right or len({*target}) != len(target) or not {*target} <= {*letters}:
        raise CompileError(
            f"{find_source()}: einsum needs an equation such as 'ij,jk->ik', with letters for the"
            f" axes of each operand; got {equation!r} for {len(operands)} operands"
        )
    factors = _with_extents(terms, [*operands], equation)
    axes = [ord(letter) for letter in target]
    product = factors[0]
    for place, other in enumerate(factors[1:], 2):
        # An axis that a later operand or the result has must not be summed yet.
        later = {number for _, numbers in factors[place:] for number in numbers}
        product = _contracted(product, other, later.union(axes))
    return _summed(*product, axes)


_UNNAMED = "".join(map(chr, range(0xC0, 0xC0 + 20)))
"""Letters for axes that `...` stands for; they come after those of a user, who has ASCII's."""


def _spelled_out(text: str, operands: Sequence[Tensor]) -> str:
    """Return an equation with letters in place of `...`, which end alike in all operands."""
    head, arrow, target = text.partition("->")
    terms = head.split(",")
    if not text.isascii() or "..." not in head or len(terms) != len(operands):
        return text
    depths = [
        x.ndim - len(term.replace("...", "")) if "..." in term else 0
        for term, x in zip(terms, operands, strict=True)
    ]
    most = max(depths)
    if min(depths) < 0 or most > len(_UNNAMED):
        return text
    new_terms = [
        term.replace("...", _UNNAMED[most - depth : most], 1)
        for term, depth in zip(terms, depths, strict=True)
    ]
    unnamed = _UNNAMED[:most]
    target = target.replace("...", unnamed, 1) if arrow else unnamed + _once(head)
    return f"{','.join(new_terms)}->{target}"


def _once(letters: str) -> str:
    return "".join(sorted([c for c in letters if c.isalpha() and letters.count(c) == 1]))


def _with_extents(terms: list[str], tensors: list[Tensor], equation: str) -> list[_Named]:
    """Return operands without repeated axes, those of extent 1 stretched to their letter's."""
    extents: dict[str, int] = {}
    for term, x in zip(terms, tensors, strict=True):
        if len(term) != x.ndim:
            raise CompileError(
                f"{find_source()}: einsum {equation!r} has {len(term)} letters for {x.type}"
            )
        for letter, extent in zip(term, x.shape, strict=True):
            # An extent of 1 broadcasts, so a later one takes its place.
            if extents.setdefault(letter, extent) == 1:
                extents[letter] = extent
            if extent not in (1, extents[letter]):
                raise CompileError(
                    f"{find_source()}: einsum {equation!r} has extents {extents[letter]} and"
                    f" {extent} for {letter!r}"
                )
    factors: list[_Named] = []
    for term, tensor in zip(terms, tensors, strict=True):
        names, x = list(term), tensor
        if wide := tuple([extents[letter] for letter in term]):
            x = x if x.shape == wide else x.broadcast_to(wide)
        while again := [name for name in names if names.count(name) > 1]:
            first = names.index(again[0])
            second = names.index(again[0], first + 1)
            # A letter that an operand has twice is its diagonal, which `diagonal` puts last.
            x = diagonal(x, 0, first, second)
            names = [n for i, n in enumerate(names) if i not in (first, second)] + again[:1]
        factors.append((x, [ord(name) for name in names]))
    return factors


def _contracted(a: _Named, b: _Named, kept: set[int]) -> _Named:
    """Return the product of two tensors, summed over what is not kept."""
    x, left = a
    y, right = b
    x, left = _without(x, left, [n for n in left if n not in kept and n not in right])
    y, right = _without(y, right, [n for n in right if n not in kept and n not in left])
    # batch: in both and kept; inner: in both and summed; rows and columns: in one of them.
    both = [n for n in left if n in right and n in kept]
    over = [n for n in left if n in right and n not in kept]
    own, other = [[n for n in side if n not in both + over] for side in (left, right)]
    extents = dict(zip(left + right, x.shape + y.shape, strict=True))
    batch, rows, columns = [[extents[n] for n in part] for part in (both, own, other)]
    x = x.permute([left.index(n) for n in both + own + over])
    names = both + own + other
    # Nothing is summed: a broadcast product, for which a matrix product would have an inner axis of
    # 1.
    if not over:
        y = y.permute([right.index(n) for n in both + other])
        return x.reshape(*batch, *rows, *[1] * len(other)) * y.reshape(
            *batch, *[1] * len(own), *columns
        ), names
    inner = math.prod([extents[n] for n in over])
    y = y.permute([right.index(n) for n in both + over + other])
    matrices = x.reshape(*batch, math.prod(rows), inner) @ y.reshape(
        *batch, inner, math.prod(columns)
    )
    return matrices.reshape(*batch, *rows, *columns), names


def _without(x: Tensor, names: list[int], gone: list[int]) -> _Named:
    if not gone:
        return x, names
    return x.sum([names.index(n) for n in gone]), [n for n in names if n not in gone]


def _summed(x: Tensor, names: list[int], wanted: list[int]) -> Tensor:
    x, names = _without(x, names, [n for n in names if n not in wanted])
    return x.permute([names.index(n) for n in wanted])
