"""Where arrays begin, and which of them nobody can write into."""

import numpy as np
import pytest

from compiler.contract.host_arrays import aligned_empty, freeze, is_frozen


@pytest.mark.parametrize("shape", [(), (0,), (3,), (1000, 7), (1 << 20,), (2, 0, 5)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool"])
def test_an_array_is_like_numpys_and_a_large_one_begins_at_a_line(shape, dtype):
    array = aligned_empty(shape, dtype)
    assert array.shape == shape
    assert array.dtype == np.dtype(dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % array.dtype.itemsize == 0
    if array.nbytes >= 16 << 10:
        assert array.ctypes.data % 64 == 0


def test_what_numpy_refuses_is_refused_alike():
    for shape in ((1 << 40, 1 << 40), (1 << 60,), (-1, 1 << 20), (1 << 63,)):
        with pytest.raises((MemoryError, ValueError)):
            aligned_empty(shape, "float32")


@pytest.mark.parametrize("size", [3, 10_000])
def test_what_is_frozen_cannot_be_written_by_who_has_it(size):
    array = aligned_empty((size,), "float32")
    assert not is_frozen(array)
    freeze(array)
    assert is_frozen(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        (array if array.base is None else array.base)[0] = 1


def test_a_read_only_view_of_what_can_be_written_is_not_frozen():
    whole = np.zeros(100, np.float32)
    part = whole[10:20]
    part.flags.writeable = False
    assert not is_frozen(part)
    whole.flags.writeable = False
    assert is_frozen(part)
    assert is_frozen(whole)


def test_an_array_on_memory_of_others_is_not_frozen():
    assert not is_frozen(np.frombuffer(bytes(64), np.float32))
    assert not is_frozen(np.frombuffer(bytearray(64), np.float32))
