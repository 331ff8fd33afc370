import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.attrs import AttrValue, PlainValue
from compiler.contract.codec import Bounds, from_row, to_row
from compiler.contract.errors import PlanFormatError
from compiler.contract.program import FusedProgram


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


texts = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
leaves = st.builds(Leaf, texts)
branches = st.builds(
    Branch,
    st.sampled_from(Colour),
    st.lists(leaves).map(tuple),
    st.tuples(st.integers(0, 2**63), st.sampled_from(Colour)),
    st.lists(st.tuples(texts, st.none() | st.integers(-5, 5))).map(tuple),
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


@dataclass(frozen=True, slots=True)
class Tree:
    size: Annotated[int, Bounds(0, 9)]
    weight: float
    branch: Branch | None
    attrs: tuple[tuple[str, PlainValue], ...]
    is_tall: bool = False


TREE = (3, 0.5, ("red", (("a",),), (1, "blue"), (), None), (("k", (1, "x")),), True)


def deep(levels):
    value = ()
    for _ in range(levels):
        value = (value,)
    return value


def put(way, value, row=TREE):
    """Return the row with another value at the end of a way of places."""
    place, *rest = way
    inner = put(rest, value, row[place]) if rest else value
    return (*row[:place], inner, *row[place + 1 :])


def test_the_row_of_a_tree_is_read():
    assert from_row(Tree, TREE).branch.leaves == (Leaf("a"),)
    assert from_row(Tree, put([2], None)).branch is None


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        ([0], -1, "size is -1, expected a whole number from 0 to 9"),
        ([0], 10, "size is 10,"),
        ([0], 2**63, "size is 9223372036854775808,"),
        ([0], True, "size is True,"),
        ([0], 3.0, "size is 3.0,"),
        ([0], "3", "size is '3',"),
        ([1], math.nan, "weight is nan, expected a finite number"),
        ([1], -math.inf, "weight is -inf,"),
        ([1], None, "weight is None,"),
        ([2], (), "branch is a sequence of 0, expected a row of 5 fields"),
        ([2, 0], "green", "branch.colour is 'green', expected one of red, blue"),
        ([2, 0], ("red",), "branch.colour is a sequence of 1,"),
        ([2, 1], ["a"], "branch.leaves is"),
        ([2, 1, 0, 0], 7, r"branch.leaves\[0\].name is 7, expected a text"),
        ([2, 1, 0, 0], "a\nb", r"branch.leaves\[0\].name is 'a\\nb', expected a text without con"),
        ([2, 1, 0, 0], "\x1b[2J", "without control characters"),
        ([2, 1, 0, 0], "a\u2028b", "without control characters"),
        ([2, 1, 0, 0], "\u202eexe", "without control characters"),
        ([2, 1, 0, 0], "\u2066exe", "without control characters"),
        ([2, 2], (1,), "branch.pair is a sequence of 1, expected a sequence of 2"),
        ([2, 4], "text", "branch.data is 'text', expected bytes"),
        ([3, 0, 1], {}, r"attrs\[0\]\[1\] is a mapping of 0,"),
        ([3, 0, 1, 1], "\x00", "without control characters"),
        ([3, 0, 1], deep(40), "at most 16 sequences within each other"),
        ([4], 1, "is_tall is 1, expected true or false"),
    ],
)
def test_the_first_wrong_value_is_named_with_its_way(way, value, message):
    with pytest.raises(PlanFormatError, match=f"damaged plan: .*{message}"):
        from_row(Tree, put(way, value))


def test_names_in_other_scripts_are_texts_like_any():
    name = "層.重み\u3000é\xa0ß"
    assert from_row(Leaf, (name,)).name == name


@dataclass(frozen=True)
class Holder:
    attr: AttrValue


@pytest.mark.parametrize("every", [True, 1.0, msgpack.Timestamp(1), msgpack.ExtType(1, b"")])
def test_a_structure_read_before_stands_for_no_row_that_only_compares_equal(every):
    def row(repeats: object) -> object:
        return ({"fused_program": ((("float32", "full", repeats, 0),), (), (0,))},)

    read = from_row(Holder, row(1)).attr
    assert isinstance(read, FusedProgram)
    assert from_row(Holder, row(1)).attr == read
    with pytest.raises(PlanFormatError, match=r"inputs\[0\]\.every is .*, expected a whole number"):
        from_row(Holder, row(every))
