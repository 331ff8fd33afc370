"""A kernel as every target has it: planned from types and layouts, bound to bytes at load.

`plan` is a function of a call alone, so it needs no device and gives the same in every process. It
is called when a program is compiled, for what the call needs, and again when the program is loaded,
perhaps elsewhere, for the binding. `KernelPlan.bind` gets the arrays and the planned scratch,
prepares every view, and returns a launch: one call without arguments that allocates nothing and
writes only its outputs and its scratch.

The file also has what a kernel and its callers exchange: scratch (`Piece`), work (`Work`), operands
(`Operand`), attributes, and integer operands that choose rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from actors.kernels.common.strides import BLOCK_BYTES
from actors.machine.protocol import Array, Arrays, Launch
from compiler.contract.attrs import AttrValue
from compiler.contract.errors import InternalError, bad_index
from compiler.contract.program import FusedProgram
from compiler.contract.region import TiledLoop
from compiler.contract.types import DType, TensorType, contiguous_strides, numpy_dtype

# Scratch. A kernel lists the `Piece`s that it wants once, in its plan; so the bytes asked for and
# the arrays carved cannot differ. Pieces begin at multiples of 64 bytes (a cache line, and the
# widest vector register).

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A dense array of scratch."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def size_bytes(self) -> int:
        """Bytes with padding to the alignment."""
        dense = math.prod(self.shape) * self.dtype.itemsize
        return -(-dense // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def size_bytes(pieces: tuple[Piece, ...]) -> int:
    """Return the bytes of all pieces together."""
    return sum(piece.size_bytes for piece in pieces)


def carve(workspace: Array | None, pieces: tuple[Piece, ...]) -> tuple[Array, ...]:
    """Return the arrays of `pieces` in `workspace`. Raises InternalError if it is too small."""
    needed, size = size_bytes(pieces), 0 if workspace is None else workspace.size
    if size < needed:
        raise InternalError(f"a kernel needs {needed} bytes of workspace and got {size}")
    arrays: list[Array] = []
    offset = 0
    for piece in pieces:
        dense = math.prod(piece.shape) * piece.dtype.itemsize
        # An empty slice of a workspace cannot be viewed as a wider type.
        if workspace is None or dense == 0:
            arrays.append(np.empty(piece.shape, piece.dtype))
        else:
            arrays.append(workspace[offset : offset + dense].view(piece.dtype).reshape(piece.shape))
        offset += piece.size_bytes
    return tuple(arrays)


def workers_for(
    pieces: Callable[[int], tuple[Piece, ...]], workspace: Array | None, most: int
) -> int:
    """Return how many workers a workspace has room for, at least one: a plan may know fewer."""
    size = 0 if workspace is None else workspace.size
    while most > 1 and size_bytes(pieces(most)) > size:
        most -= 1
    return max(1, most)


def window(flat: Array, shape: tuple[int, ...]) -> Array:
    """Return the first bytes of a vector of scratch as a dense array of `shape`."""
    return flat[: math.prod(shape)].reshape(shape)


# Work. A kernel describes a call as passes over bytes of its result, matrix products and calls of
# numpy: quantities that no machine changes. `cost` turns them into time at the rates of a machine.
# So what is known of a kernel is written once, beside the kernel, and holds for the planner's fixed
# rates and for measured ones.

CALLS_PER_PRODUCT = 2
"""numpy's way to BLAS is twice as long as to a loop of its own (1.6 against 0.8 us)."""


NATIVE_CALLS = NATIVE_LOOPS = 0.1
"""What a call from C costs, in calls of numpy, and a short loop in C in loops of numpy."""


class BytePass(Enum):
    """A sort of pass over bytes in cache; all of one sort cost about the same per byte."""

    SIMPLE = "simple"
    """Copies, and sums and products with a scalar: one array is read."""
    PLAIN = "plain"
    """Sums, products and comparisons of two arrays."""
    DIVIDE = "divide"
    ROOT = "root"
    EXP = "exp"
    """Exponentials and logarithms."""
    TANH = "tanh"
    POWER = "power"
    """Powers, sines and cosines."""
    REDUCE = "reduce"
    """numpy's own reductions; per byte of the operand."""
    STRIDED = "strided"
    """Passes whose innermost step is not one element."""
    GATHER = "gather"
    """Rows taken by index."""
    SCATTER = "scatter"
    """Elements added by index."""
    MASKED = "masked"
    """Elements that numpy moves or adds where a flag says so: branches that are mispredicted."""
    RANDOM = "random"
    MOVE = "move"
    """Operands that a program in C reads and writes."""
    ADD = "add"
    """Instructions of a program in C, in additions of float32; they run while others are moved."""
    SCORE = "score"
    """Scores of attention in C, beside their products: an exponential each, and the mask."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`count` products of a matrix [m, k] with one [k, n] in float32."""

    count: float
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.count * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does.

    `calls` of numpy; `loops` are inner loops beyond one per call, which broadcasting and strides
    cause; `passes` pairs a sort of pass with the bytes it goes over; `unswept` are operands
    (inputs, then outputs) that are not read as a whole. Threads share a launch in C, `is_native`,
    if it is long enough.
    """

    calls: float = 1.0
    loops: float = 0.0
    passes: tuple[tuple[BytePass, float], ...] = ()
    products: tuple[MatrixProduct, ...] = ()
    unswept: tuple[int, ...] = ()
    is_native: bool = False

    def then(self, other: Work) -> Work:
        """Return the work of both; `unswept` are this one's."""
        return Work(
            self.calls + other.calls,
            self.loops + other.loops,
            (*self.passes, *other.passes),
            (*self.products, *other.products),
            self.unswept,
            self.is_native and other.is_native,
        )


def native_work(
    *passes: tuple[BytePass, float], rows: int = 0, unswept: tuple[int, ...] = ()
) -> Work:
    """Return the work of a launch in C that makes these passes, with a loop for each row."""
    return Work(NATIVE_CALLS, NATIVE_LOOPS * rows, passes, unswept=unswept, is_native=True)


def item_weight(itemsize: int) -> float:
    """Return how many products of float32 take the time of one of a wider type."""
    return itemsize / 4


def over_blocks(
    elements: int,
    itemsize: int,
    passes: Mapping[BytePass, float],
    *,
    small_calls: float = 0.0,
    loops: float = 0.0,
    products: tuple[MatrixProduct, ...] = (),
) -> Work:
    """Return the work of passes over a tensor that is cut into blocks.

    `small_calls` are calls per block on operands far smaller than the block. Each entry of
    `products` is spread over the blocks.
    """
    size = elements * itemsize
    num_blocks = max(1, -(-size // BLOCK_BYTES))
    calls = sum(passes.values()) + small_calls + CALLS_PER_PRODUCT * len(products)
    swept = tuple([(sort, count * size) for sort, count in passes.items()])
    return Work(num_blocks * calls, loops, swept, products)


def over_operands(
    shape: tuple[int, ...],
    strides: Sequence[tuple[int, ...]],
    itemsizes: Sequence[int],
    sort: BytePass | None = None,
) -> Work:
    """Return the work of one call over operands of a shape, given by their strides, output last.

    `sort` is for what is slower than an addition. numpy walks the axes in the order of the output's
    strides and joins those that it can; what is left costs a loop each.
    """
    elements = math.prod(shape)
    if not elements:
        return Work()
    axes = [axis for axis, extent in enumerate(shape) if extent > 1]
    axes.sort(key=lambda axis: -abs(strides[-1][axis]))
    inner = 1
    for axis in reversed(axes):
        # Joined from the innermost out, as far as every operand steps evenly.
        if axis != axes[-1] and any(steps[axis] != steps[axes[-1]] * inner for steps in strides):
            break
        inner *= shape[axis]
    is_dense = not axes or all(
        steps[axes[-1]] in (0, item) for steps, item in zip(strides, itemsizes, strict=True)
    )
    if sort is None:
        sort = BytePass.SIMPLE if len(strides) < 3 else BytePass.PLAIN
        sort = sort if is_dense else BytePass.STRIDED
    return Work(1.0, elements // inner - 1.0, ((sort, float(elements * max(itemsizes))),))


Attrs = Mapping[str, AttrValue]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as a kernel sees it at compile time; a stride of 0 repeats an axis."""

    type: TensorType
    offset_bytes: int
    strides_bytes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the tensor."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The element type as numpy has it; bfloat16 is uint16 there."""
        return numpy_dtype(self.type.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether the bytes are those of a row-major copy."""
        return is_dense(self.shape, self.strides_bytes, self.dtype.itemsize)


Operands = tuple[Operand, ...]


def operands_of(arrays: Arrays) -> Operands:
    """Return arrays as a plan sees them; none of bfloat16, which numpy does not know."""
    return tuple([Operand(TensorType(DType(x.dtype.name), x.shape), 0, x.strides) for x in arrays])


Workspace = Array | None
"""Planned scratch: a dense vector of uint8; None where a call needs none."""


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What the planner must know of a kernel for one call.

    `in_place` lists pairs (output, input) that may share bytes; where inputs share bytes, each
    needs its pair. `workspace_bytes` is scratch that the launch overwrites before it reads;
    `duration_ns` is an estimate, the same on every machine. `work` is what the estimate was made
    from; with it the launch can be priced for another machine (`cost`).

    Where it keeps the input `prepacked_input`, a variable that no step writes, in a form of its
    own, the workspace is the launch's from step to step: zeros at first, and whenever that variable
    is given other values.
    """

    workspace_bytes: int = 0
    in_place: tuple[tuple[int, int], ...] = ()
    duration_ns: float = 0.0
    work: Work | None = None
    prepacked_input: int | None = None


Binding = TypeVar("Binding", covariant=True)
"""What binds the launches of a device."""


@dataclass(frozen=True, slots=True)
class KernelPlan(Generic[Binding]):
    """What a kernel makes of a call: what it needs, and how it is bound.

    `bind(inputs, outputs, workspace)` gets operands that lie as those of the call, at any address.
    The workspace is a dense vector of uint8, aligned to 64 bytes, and None where a call needs none.
    It may be smaller than `needs` says, for fewer threads: no smaller than for one.
    """

    needs: KernelNeeds
    bind: Binding


def _always(attrs: Attrs, inputs: Operands, outputs: Operands) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Kernel(Generic[Binding]):
    """A function that plans calls of an op on some device, under a name.

    The name is that in plans, unique in the catalogue of its device: "numpy.fused". `plan` returns
    None for a call that the kernel does not take. It touches no device and compiles nothing, which
    is left to `KernelPlan.bind`.

    Of several kernels that can take a call, the one that is fastest on this machine `is_chosen` for
    it. A plan has chosen already, perhaps elsewhere; then what counts is what the kernel can.
    """

    name: str
    op: str
    plan: Callable[[Attrs, Operands, Operands], KernelPlan[Binding] | None] = field(repr=False)
    is_chosen: Callable[[Attrs, Operands, Operands], bool] = field(default=_always, repr=False)


BindToArrays = Callable[[Arrays, Arrays, Workspace], Launch]
HostPlan = KernelPlan[BindToArrays]
HostKernel = Kernel[BindToArrays]


def require_plan(
    kernel: Kernel[Binding], attrs: Attrs, inputs: Operands, outputs: Operands
) -> KernelPlan[Binding]:
    """Return the plan of a call that is loaded. Raises InternalError where it is not taken."""
    plan = kernel.plan(attrs, inputs, outputs)
    if plan is None:
        types = ", ".join([f"{x.type} strides {x.strides_bytes}" for x in (*inputs, *outputs)])
        raise InternalError(f"{kernel.name} is bound to operands that it does not take: {types}")
    return plan


def is_dense(shape: tuple[int, ...], strides_bytes: tuple[int, ...], itemsize: int) -> bool:
    """Return whether the strides are those of a row-major copy; extents of 1 do not matter."""
    if 0 in shape:
        return True
    dense = contiguous_strides(shape, itemsize)
    return all(n == 1 or s == d for n, s, d in zip(shape, strides_bytes, dense, strict=True))


def in_sequence(calls: Iterable[Launch]) -> Launch:
    """Return one launch that makes these calls in order."""
    chain = tuple(calls)
    # A single call needs no loop around it.
    if len(chain) == 1:
        return chain[0]

    def launch() -> None:
        for call in chain:
            call()

    return launch


def equal_operands(output: int, outputs: Operands, inputs: Operands) -> tuple[tuple[int, int], ...]:
    """Return the pairs (output, input) where an input could give its bytes to this output."""
    out = outputs[output]
    return tuple(
        (output, index)
        for index, operand in enumerate(inputs)
        if out.is_dense and operand.is_dense and operand.type == out.type
    )


# Readers of attributes, each of one type.


def number(attrs: Attrs, name: str) -> float:
    """Return a real attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    return float(value)


def integer(attrs: Attrs, name: str) -> int:
    """Return an integer attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "an int", value)
    return value


def text(attrs: Attrs, name: str) -> str:
    """Return a text attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, str):
        raise _wrong(name, "a str", value)
    return value


def flag(attrs: Attrs, name: str) -> bool:
    """Return a boolean attribute. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, bool):
        raise _wrong(name, "a bool", value)
    return value


def integers(attrs: Attrs, name: str) -> tuple[int, ...]:
    """Return a tuple of ints. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, tuple):
        raise _wrong(name, "a tuple of ints", value)
    items = tuple([item for item in value if isinstance(item, int)])
    if len(items) != len(value):
        raise _wrong(name, "a tuple of ints", value)
    return items


def fused_program(attrs: Attrs, name: str) -> FusedProgram:
    """Return a program. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, FusedProgram):
        raise _wrong(name, "a program", value)
    return value


def region(attrs: Attrs, name: str) -> TiledLoop:
    """Return a region. Raises InternalError when it is missing or of another kind."""
    value = _present(attrs, name)
    if not isinstance(value, TiledLoop):
        raise _wrong(name, "a region", value)
    return value


def _present(attrs: Attrs, name: str) -> AttrValue:
    if name not in attrs:
        raise InternalError(f"attribute {name!r} is missing; there are {sorted(attrs)}")
    return attrs[name]


def _wrong(name: str, expected: str, value: AttrValue) -> InternalError:
    return InternalError(f"attribute {name!r} should be {expected}, not {value!r:.60}")


def refuse_unplanned(*operands: object) -> NoReturn:
    """Raise InternalError: what binds a loop or a branch of a body that has no plan yet."""
    raise InternalError("a loop or a branch is bound without the plan of its body")


# Integer operands that choose rows: converted to index type and checked at every launch.

INDEX = np.dtype(np.int64)


def index_pieces(elements: int) -> tuple[Piece, ...]:
    """Return scratch for a dense int64 copy of the indices and for two extremes."""
    return (Piece((elements,), INDEX), Piece((2,), INDEX))


def checked(
    what: str,
    indices: Array,
    extent: int,
    dense: Array,
    extremes: Array,
    axes: tuple[int, ...] = (),
    first: int = 0,
) -> Launch:
    """Return the launch that copies `indices` to `dense` (flat) and checks 0 <= index < extent.

    The check is ours because numpy's own (mode "raise") works on a copy of the output. The launch
    raises IndexError naming `what`, the first bad value, its position and the allowed range; see
    `bad_index` for `axes`. Indices of one axis are counted from `first`.
    """
    if indices.size == 0:
        return in_sequence(())
    copy = partial(np.copyto, dense.reshape(indices.shape), indices, casting="unsafe")
    smallest, largest = extremes[0:1].reshape(()), extremes[1:].reshape(())
    minimum = partial(np.minimum.reduce, dense, out=smallest)
    maximum = partial(np.maximum.reduce, dense, out=largest)

    def launch() -> None:
        copy()
        minimum()
        maximum()
        if int(smallest) < 0 or int(largest) >= extent:
            raise _first_bad(what, indices, extent, axes, first)

    return launch


def as_index(array: Array) -> NDArray[np.int64]:
    """Return an array of the index type, as a type checker knows it."""
    return array.view(INDEX)


def fill_range(vector: Array, step: int) -> tuple[Launch, ...]:
    """Return the calls that fill an index vector with 0, step, 2 step, ..."""
    return (
        # 0 first, then running sums of equal steps.
        partial(vector.fill, step),
        partial(vector[:1].fill, 0),
        partial(np.add.accumulate, vector, out=vector),
    )


def axes_of(attrs: Attrs) -> tuple[int, ...]:
    """Return the extents of the axes that flat indices were made of; none for plain ids."""
    return integers(attrs, "axes") if "axes" in attrs else ()


def _first_bad(
    what: str, indices: Array, extent: int, axes: tuple[int, ...], first: int
) -> IndexError:
    numbers = indices.astype(object)  # any width, any sign; only on the way to the error
    position = tuple(np.argwhere((numbers < 0) | (numbers >= extent))[0].tolist())
    counted = (position[0] + first,) if len(position) == 1 else position
    return bad_index(what, int(indices[position]), counted, extent, axes)


def steps_of(attrs: Attrs) -> int:
    """Return how often a loop runs its body."""
    length = attrs["length"]
    if not isinstance(length, int):
        raise InternalError(f"a loop has the length {length!r}")
    return length
