"""Pages that are given back to the system, counted by the system."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from actors.kernels.common.host_memory import allocate
from actors.kernels.library import onednn, resident
from compiler.contract.placement import Memory
from compiler.contract.types import DType

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped"
)

PAGE = 4096


def resident_bytes(begin):
    """Return what is resident of the mapping that an address is in."""
    size, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            first, last = [int(bound, 16) for bound in words[0].split("-")]
            is_inside = first <= begin < last
        elif is_inside and words[0] == "Rss:":
            size += int(words[1]) * 1024
    return size


@pytest.mark.skipif(not onednn.is_available(), reason="oneDNN is not installed")
def test_code_of_a_library_is_unmapped_and_runs_again():
    matrix = onednn.Matrix(DType.FLOAT32, 37, 41, 41, 1)
    other = onednn.Matrix(DType.FLOAT32, 41, 43, 43, 1)
    out = onednn.Matrix(DType.FLOAT32, 37, 43, 43, 1)
    onednn.matmul(matrix, other, out)
    code = onednn.address_of("dnnl_primitive_execute")
    before = resident_bytes(code)
    onednn.release_code()
    assert resident_bytes(code) < before / 4
    out = onednn.Matrix(DType.FLOAT32, 37, 47, 47, 1)
    assert onednn.matmul(matrix, onednn.Matrix(DType.FLOAT32, 41, 47, 47, 1), out) is not None
    assert resident_bytes(code) > 0


def test_only_code_of_a_file_counts_as_code():
    buffer = ctypes.create_string_buffer(8)
    assert resident.code_around(ctypes.addressof(buffer)) is None
    assert resident.code_around(0) is None


def test_a_large_block_takes_no_memory_until_it_is_touched():
    block = allocate(64 << 20, 64, Memory.HOST)
    begin = block.ctypes.data
    assert begin % 64 == 0
    assert len(block) == 64 << 20
    before = resident_bytes(begin)
    block[32 << 20] = 1
    # A huge page at most.
    assert 0 < resident_bytes(begin) - before <= 2 << 20
    assert not np.any(block[: 32 << 20 : PAGE])
