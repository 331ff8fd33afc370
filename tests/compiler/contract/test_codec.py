import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgpack
import pytest
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.attrs import AttrValue, PlainValue
from compiler.contract.codec import (
    Bounds,
    DecodeError,
    JsonObject,
    Text,
    from_json,
    from_object,
    from_row,
    text_where,
    to_json,
    to_object,
    to_row,
)
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


TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Marks that turn the direction of a line, which no text of a plan has."""
texts = st.text(
    st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"), exclude_characters=TURNING)
)
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
    with raises(DecodeError):
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
    ("way", "value"),
    [
        ([0], -1),
        ([0], 10),
        ([0], 2**63),
        ([0], True),
        ([0], 3.0),
        ([0], "3"),
        ([1], math.nan),
        ([1], -math.inf),
        ([1], None),
        ([2], ()),
        ([2, 0], "green"),
        ([2, 0], ("red",)),
        ([2, 1], ["a"]),
        ([2, 1, 0, 0], 7),
        ([2, 1, 0, 0], "a\nb"),
        ([2, 1, 0, 0], "\x1b[2J"),
        ([2, 1, 0, 0], "a\u2028b"),
        ([2, 1, 0, 0], "\u202eexe"),
        ([2, 1, 0, 0], "\u2066exe"),
        ([2, 2], (1,)),
        ([2, 4], "text"),
        ([3, 0, 1], {}),
        ([3, 0, 1, 1], "\x00"),
        ([3, 0, 1], deep(40)),
        ([4], 1),
    ],
)
def test_the_first_wrong_value_is_named_with_its_way(way, value):
    with raises(DecodeError):
        from_row(Tree, put(way, value))


@dataclass(frozen=True)
class Few:
    sizes: Annotated[tuple[Annotated[int, Bounds(0, 9)], ...], 2]


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], [1, 10]])
def test_a_sequence_has_the_length_that_its_hint_gives(sizes):
    assert from_object(Few, {"sizes": [1, 2]}) == Few((1, 2))
    with raises(DecodeError):
        from_object(Few, {"sizes": sizes})


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
    with raises(DecodeError):
        from_row(Holder, row(every))


HOUSE = Path(__file__).resolve().parents[3]
DECODERS = {
    "compiler/contract/codec.py": {"json.loads", "marshal.loads", "msgpack.unpackb"},
    # Of a child process that must not import the rest, of a library, and of the other ranks.
    "actors/kernels/library/openblas.py": {"json.loads"},
    "actors/device/cuda/cudnn.py": {"json.loads"},
    "actorflow/distributed/process_group.py": {"json.loads"},
    "actorflow/data/workers.py": {"pickle.loads"},  # what a process gives those that it starts
}
"""What decodes bytes from elsewhere, by the file that may."""

DECODES = re.compile(
    r"\b(?:json|marshal|msgpack|pickle|orjson|tomllib)\.\w*(?:load|unpack|Unpack)\w*"
)


def test_one_codec_decodes_what_comes_from_elsewhere():
    files = [
        f
        for floor in ("actorflow", "actors", "compiler", "memory")
        for f in (HOUSE / floor).rglob("*.py")
    ]
    decoders = {str(f.relative_to(HOUSE)): {*DECODES.findall(f.read_text())} for f in files}
    assert {file: calls for file, calls in decoders.items() if calls} == DECODERS


@dataclass(frozen=True, slots=True)
class Entry:
    name: Annotated[str, text_where(str.islower, "lower case")]
    size: Annotated[int, Bounds(0, 9)]
    label: Text = ""


@dataclass(frozen=True, slots=True)
class Index:
    entries: tuple[Entry, ...]
    state: JsonObject | None
    sizes: Mapping[Text, int]
    pair: tuple[int, Colour]


letters = st.text(st.characters(exclude_categories=("Cs",)))
plain_json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | letters,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(letters, inner, max_size=3),
    max_leaves=8,
)
indices = st.builds(
    Index,
    st.lists(st.builds(Entry, st.just("a"), st.integers(0, 9), letters)).map(tuple),
    st.none() | st.dictionaries(letters, plain_json_values, max_size=3),
    st.dictionaries(letters, st.integers(), max_size=3),
    st.tuples(st.integers(), st.sampled_from(Colour)),
)


@given(indices)
def test_what_went_through_json_as_an_object_comes_back_equal(index):
    assert from_object(Index, from_json(to_json(to_object(index)))) == index


INDEX = {
    "entries": [{"name": "a", "size": 3, "label": "x\n"}],
    "state": {"k": [1, {"l": None}]},
    "sizes": {"a": 1},
    "pair": [1, "red"],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([], []),
        (["more"], 1),
        (["entries"], {}),
        (["entries", 0], {"name": "a"}),
        (["entries", 0, "name"], "A"),
        (["entries", 0, "size"], 10),
        (["entries", 0, "label"], None),
        (["state"], []),
        (["state", "k", 1, "l"], math.inf),
        (["sizes", "a"], True),
        (["sizes", "\x1b[2J"], ""),
        (["pair", 1], "green"),
    ],
)
def test_the_first_wrong_value_of_an_object_is_named_with_its_path(path, value):
    lie = {"": json.loads(json.dumps(INDEX))}
    place = lie
    for key in ["", *path[:-1]]:
        last, place = place, place[key]
    if path:
        place[path[-1]] = value
    else:
        last[""] = value
    with raises(DecodeError):
        from_object(Index, lie[""])


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b"[" * 100_000, b"NaN", b"[Infinity]", b'{"a": 1, "a": 2}',
        b'"\\ud800"', b"1" * 5000,
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_what_is_no_json_is_refused(text):
    with raises(DecodeError):
        from_json(text)


def decoded_and_encoded(data):
    """What the standard library says of a text that it can also write; None of others."""

    def unique(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    try:
        value = json.loads(data, object_pairs_hook=unique, parse_constant=float.fromhex)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, AssertionError):
        return None
    return value


PIECES = ['"', "\\", "\\u", "d800", "dc00", "0041", "\ud800", "\udc00", "é", "{", "}", "[", "]",
          ":", ",", "1", "a", "\ufeff", " "]  # fmt: skip


@given(
    st.one_of(
        st.lists(st.sampled_from(PIECES), max_size=8).map(lambda some: f'["{"".join(some)}"]'),
        st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    ),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]),
)
def test_a_text_is_read_as_the_standard_library_does_if_it_can_be_printed(text, encoding):
    data = text.encode(encoding, "surrogatepass")
    try:
        value = from_json(data)
    except DecodeError:
        value = None
    assert value == decoded_and_encoded(data)
