import pytest
from error_texts import raises

from actorflow.environment.option_values import parse_bytes


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (1, 1),
        ("1", 1),
        ("600MiB", 600 << 20),
        ("600 mib", 600 << 20),
        ("2GB", 2_000_000_000),
        ("1.5 KiB", 1536),
        ("0.1kB", 100),
        ("1_000 B", 1000),
        (" 3 TiB ", 3 << 40),
    ],
)
def test_a_size_is_an_integer_or_a_number_with_a_unit(written, num_bytes):
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize(
    "written", ["", "MiB", "-1", "1e9", "1 MiBs", "1,5GB", "0.1 B", 0, -1, 1 << 60, 1.5, True, None]
)
def test_anything_else_is_refused_and_named(written):
    with raises(ValueError):
        parse_bytes(written)
