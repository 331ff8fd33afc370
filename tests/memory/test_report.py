import pytest
from error_texts import raises

from memory.report import format_bytes, memory_table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (1023 * 2**20, "1023.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (-2048, "-2.0 KiB"),
        (5000 * 2**60, "5000.0 EiB"),
    ],
)
def test_sizes_read_like_a_person_writes_them(num_bytes, text):
    assert format_bytes(num_bytes) == text


def table(**options):
    return memory_table(
        ["weights", "logits", "blocks.0.mlp", "grad", "batch"],
        [0, 2, 1, 4, 0],
        [6, 4, 3, 6, 2],
        [1024, 6 * 1024, 1024, 512, 512],
        [0, 2048, 1024, 1024, 2048],
        **options,
    )


def test_the_table_says_where_the_peak_is_and_who_holds_it():
    assert table() == (
        "memory: arena 8.0 KiB, 0.0% above the peak of live bytes",
        "peak: step 2, 3 tensors of 8.0 KiB are live",
        "   share         size  live                      offset  tensor",
        "   75.0%      6.0 KiB  [2, 4)                      2048  logits",
        "   12.5%      1.0 KiB  [0, 6)                         0  weights",
        "   12.5%      1.0 KiB  [1, 3)                      1024  blocks.0.mlp",
    )


def test_tensors_beyond_the_top_share_one_line():
    lines = table(top=1)
    assert lines[3].endswith("logits")
    assert lines[4] == "   25.0%      2.0 KiB  in 2 others"
    assert len(lines) == 5


def test_a_gap_between_arena_and_live_bytes_is_stated():
    lines = memory_table(["a", "b"], [0, 1], [1, 2], [100, 100], [0, 100])
    assert lines[0] == "memory: arena 200 B, 100.0% above the peak of live bytes"


def test_a_plan_without_bytes_says_so():
    assert memory_table([], [], [], [], []) == ("memory: nothing occupies a byte",)


def test_a_missing_name_is_refused():
    with raises(ValueError):
        memory_table([], [0], [1], [8], [0])
