from dataclasses import dataclass
from enum import Enum

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.errors import PlanFormatError
from compiler.rows import from_row, to_row


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str


@dataclass(frozen=True, slots=True)
class Branch:
    colour: Colour
    leaves: tuple[Leaf, ...]
    pair: tuple[int, Colour]
    plain: tuple[tuple[str, int | None], ...]
    data: bytes | None = None


leaves = st.builds(Leaf, st.text())
branches = st.builds(
    Branch,
    st.sampled_from(Colour),
    st.lists(leaves).map(tuple),
    st.tuples(st.integers(0, 2**63), st.sampled_from(Colour)),
    st.lists(st.tuples(st.text(), st.none() | st.integers(-5, 5))).map(tuple),
    st.none() | st.binary(),
)


@given(branches)
def test_what_went_through_msgpack_as_a_row_comes_back_equal(branch):
    carried = msgpack.unpackb(msgpack.packb(to_row(branch)), use_list=False)
    assert from_row(Branch, carried) == branch


def test_a_row_holds_the_fields_in_order_and_the_values_of_enums():
    row = to_row(Branch(Colour.RED, (Leaf("a"),), (1, Colour.BLUE), (("k", None),)))
    assert msgpack.unpackb(msgpack.packb(row)) == [
        "red",
        [["a"]],
        [1, "blue"],
        [["k", None]],
        None,
    ]


@pytest.mark.parametrize(
    "row",
    [
        ("red", (), (1, "blue"), ()),
        ("red", (("a", "b"),), (1, "blue"), (), None),
        ("green", (), (1, "blue"), (), None),
        ("red", 5, (1, "blue"), (), None),
        ("red", (), (1,), (), None),
        "red",
    ],
    ids=["too short", "a leaf too long", "no such colour", "no tuple", "half a pair", "no row"],
)
def test_a_row_of_another_class_is_refused(row):
    with pytest.raises(PlanFormatError, match="damaged plan"):
        from_row(Branch, row)
