import pytest

from actors.kernels.common.attention_blocks import BlockExtents
from actors.kernels.native.attention import _CHUNK_FLOPS, _chunks


@pytest.mark.parametrize("is_forward", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 31, 32, 33, 128, 1000])
@pytest.mark.parametrize("rows", [1, 32, 64, 300])
def test_chunks_are_equal_and_as_many_as_a_power_of_two(heads, rows, is_forward):
    e = BlockExtents(heads, rows, rows, 32, 32, True)
    block, group = _chunks(e, is_forward=is_forward)
    parts = heads * (-(-rows // block) if is_forward else 1)
    count = min(parts, 1 << (-(-parts // group) - 1).bit_length())
    assert group == -(-parts // count)
    each = min(block, rows) if is_forward else rows
    flops = each * rows * 64 * (2.0 if is_forward else 5.0)
    assert group == 1 or (group - 1) * flops <= _CHUNK_FLOPS


def test_two_threads_share_few_short_heads_evenly():
    e = BlockExtents(32, 32, 32, 32, 32, True)
    for is_forward, group in ((True, 16), (False, 8)):
        assert _chunks(e, is_forward=is_forward)[1] == group
