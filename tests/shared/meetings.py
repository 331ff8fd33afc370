"""Collectives by hand: the parts of each rank, and what must come of them, by numpy alone."""

import numpy as np

from compiler.contract.collective import Collective, LaunchSite
from compiler.contract.types import DType, TensorType, numpy_dtype


def call(op, given, left, order=0, actor="all_reduce", where="model.py:1", stream=0, **attrs):
    """Return a collective along "data", if not told otherwise."""
    attrs = {"group": "data", "order": order, **attrs}
    return Collective.of(op, attrs, (given,), (left,), site(where, actor, stream))


def site(where, actor="all_reduce", stream=0):
    """Return where a launch stands; `where` is "label at line"."""
    label, _, line = where.rpartition(" at ")
    return LaunchSite(actor, stream, "w", label, line)


def parts(extent, count):
    """Return first and last rows of each part; the first ones have one more."""
    sizes = [extent // count + (rank < extent % count) for rank in range(count)]
    ends = np.cumsum(sizes)
    return [(int(end - size), int(end)) for size, end in zip(sizes, ends, strict=True)]


def cut(whole, axis, count, rank):
    """Return the part of a rank."""
    first, last = parts(whole.shape[axis], count)[rank]
    return np.ascontiguousarray(np.take(whole, range(first, last), axis))


def values(dtype, shape, seed):
    """Return an array of numbers of every size, negative ones, and where there are some NaNs."""
    rng = np.random.default_rng(seed)
    holder = numpy_dtype(dtype)
    if dtype is DType.BOOL:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_integer:
        bounds = np.iinfo(holder)
        return rng.integers(bounds.min, bounds.max, shape, dtype=holder, endpoint=True)
    array = rng.normal(size=shape) * 2.0 ** rng.integers(-8, 8, shape)
    array = np.where(rng.random(shape) < 0.01, np.nan, array)
    if dtype is DType.BFLOAT16:
        return as_bfloat16(array.astype(np.float32))
    return array.astype(holder)


def as_bfloat16(array):
    """Return the bits of floats, to the nearest and ties to even; a NaN is one."""
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def as_float(array):
    """Return floats of bits."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def reduced(dtype, arrays, by):
    """Return the reduction by a binary tree over the arrays; halves are added in float32."""
    is_half = dtype in (DType.BFLOAT16, DType.FLOAT16)
    if dtype is DType.BFLOAT16:
        arrays = [as_float(array) for array in arrays]
    elif is_half:
        arrays = [array.astype(np.float32) for array in arrays]
    do = {"sum": np.add, "max": np.maximum, "min": np.minimum}[by]

    def tree(arrays):
        if len(arrays) == 1:
            return arrays[0]
        left = 1
        while 2 * left < len(arrays):
            left *= 2
        return do(tree(arrays[:left]), tree(arrays[left:]))

    with np.errstate(all="ignore"):
        total = tree(arrays)
        if dtype is DType.BFLOAT16:
            return as_bfloat16(total)
        return total.astype(numpy_dtype(dtype))


def same_bits(dtype, found, wanted):
    """Whether arrays are alike in all bits; any NaN is as good as another."""
    if dtype is DType.BFLOAT16:
        nan = np.isnan(as_float(found)) & np.isnan(as_float(wanted))
    elif dtype.is_float:
        nan = np.isnan(found) & np.isnan(wanted)
    else:
        nan = np.zeros(found.shape, bool)
    return found.shape == wanted.shape and bool(
        ((found.view(f"u{found.itemsize}") == wanted.view(f"u{wanted.itemsize}")) | nan).all()
    )


def placed(communicator, array):
    """Return an array of these values in memory that ranks share."""
    block = communicator.allocate(array.nbytes, 64)
    shared = block.view(array.dtype).reshape(array.shape) if array.nbytes else array.copy()
    shared[...] = array
    return shared


def type_of(dtype, array):
    """Return the type of an array."""
    return TensorType(dtype, array.shape)
