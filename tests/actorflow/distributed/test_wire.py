"""Messages travel whole, and whatever is none is refused in words."""

import contextlib
import dataclasses
import gc
import random
import sys

import msgpack
import pytest
import tiers
from error_texts import raises
from hypothesis import given
from hypothesis import strategies as st

from actorflow.distributed import agent_messages, messages
from actorflow.distributed.agent_messages import (
    AgentHello,
    AgentKeys,
    FromAgent,
    RankExited,
    ToAgent,
)
from actorflow.distributed.messages import (
    FromRank,
    GatherDone,
    GatherEntered,
    RankFailed,
    RankKeys,
    StepReached,
    ToRank,
    decode,
    encode,
    pack_value,
)
from compiler.contract.codec import DecodeError, from_msgpack
from compiler.contract.errors import InternalError

FIELDS = {
    "Number": st.integers(0, (1 << 62) - 1),
    "Words": st.text(max_size=50),
    "bool": st.booleans(),
    "bytes": st.binary(max_size=50),
    "tuple[bytes, ...]": st.lists(st.binary(max_size=20), max_size=4).map(tuple),
}


def any_of(union):
    return st.one_of(
        [
            st.builds(kind, *[FIELDS[field.type] for field in dataclasses.fields(kind)])
            for kind in union.__args__
        ]
    )


@given(any_of(FromRank))
def test_what_a_rank_says_comes_as_it_was(message):
    assert decode(encode(message), FromRank) == message


@given(any_of(ToRank))
def test_what_the_coordinator_says_comes_as_it_was(message):
    assert decode(encode(message), ToRank) == message


@given(any_of(FromAgent))
def test_what_an_agent_says_comes_as_it_was(message):
    assert decode(encode(message), FromAgent) == message


@given(any_of(ToAgent))
def test_what_an_agent_is_told_comes_as_it_was(message):
    assert decode(encode(message), ToAgent) == message


@pytest.mark.parametrize("kinds", [FromRank, FromAgent, ToAgent], ids=["rank", "agent", "launcher"])
@given(frames=st.lists(st.binary(max_size=64), max_size=4))
def test_bytes_at_random_are_refused_or_are_a_message(kinds, frames):
    try:
        message = decode(frames, kinds)
    except DecodeError:
        return
    assert type(message) in kinds.__args__


@given(any_of(FromAgent), st.data())
def test_a_message_of_an_agent_that_was_damaged_is_refused_or_is_another_one(message, data):
    frames = [bytearray(frame) for frame in encode(message)]
    frame = data.draw(st.sampled_from([frame for frame in frames if frame]))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        other = decode([bytes(frame) for frame in frames], FromAgent)
    except DecodeError:
        return
    assert type(other) in FromAgent.__args__


@pytest.mark.parametrize("seed", range(10))
def test_many_damaged_messages_are_refused_or_others_and_leave_no_memory(seed):
    """A million in all, over the seeds."""
    rng = random.Random(seed)
    whole = [
        encode(RankExited(1, 2, 0, 9, False, "the last lines")),
        encode(AgentHello("nodeB", "0.1", "3.11", "ab" * 32, 8)),
        encode(GatherEntered(7, "compile job 'train'", bytes(64), "x.py:3")),
    ]

    def num_refused(count):
        refused = 0
        for _ in range(count):
            frames = [bytearray(frame) for frame in rng.choice(whole)]
            frame = rng.choice(frames)
            for _ in range(rng.randint(1, 3)):
                frame[int(rng.random() * len(frame))] = int(rng.random() * 256)
            try:
                decode(frames, FromRank | FromAgent)
            except DecodeError:
                refused += 1
        return refused

    assert num_refused(5000) > 1000  # caches are filled by then
    gc.collect()
    before, count = sys.getallocatedblocks(), tiers.size(100_000, merge=20_000)
    num_refused(count)
    gc.collect()
    assert sys.getallocatedblocks() - before < count // 5


@given(st.binary(max_size=200))
def test_bytes_at_random_are_no_keys(data):
    for kind in (AgentKeys, RankKeys):
        with pytest.raises(InternalError, match="the bytes hold no keys of a"):
            kind.from_bytes(data)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.lists(PLAIN, max_size=5))
def test_msgpack_of_another_shape_is_refused(head):
    try:
        message = decode([msgpack.packb(head)], FromRank)
    except DecodeError:
        return
    assert head[:2] == [messages.VERSION, type(message).__name__]


def packed(*head):
    return msgpack.packb([messages.VERSION, *head])


@pytest.mark.parametrize(
    "frames",
    [
        [], [b""], [b"\xdd\xff\xff\xff\xff"], [b"\x91" * 2000], [msgpack.packb(7)],
        [msgpack.packb([3, "Hello"])], [msgpack.packb([True, "Hello"])],
        [packed("Hello") + b"\x00"], [packed("Welcome", 2)], [packed("Nonsense")],
        [packed(["Hello"])], [packed("StepReached", 1)], [packed("StepReached", 1, 2, 3, 4)],
        [packed("StepReached", 1, 2, 3), b"more"], [packed("StepReached", 1, -2, 3)],
        [packed("StepReached", 1, 1 << 63, 3)], [packed("StepReached", 1, True, 3)],
        [packed("StepReached", 1, "2", 3)], [packed("StepReached", 1, msgpack.ExtType(1, b""), 3)],
        [packed("StopRequested", 1, b"bytes")], [packed("StopRequested", 1, "x" * (1 << 17))],
        [packed("StopRequested", 1, "x" * (1 << 21))], [packed("GatherEntered", 1, "plan")],
    ],
)  # fmt: skip
def test_each_malformed_message_is_refused_by_its_fault(frames):
    with raises(DecodeError):
        decode(frames, FromRank)


def test_values_travel_in_frames_of_their_own():
    value = bytes(1000)
    assert encode(GatherEntered(1, "plan", value))[1] is value
    assert encode(GatherDone(1, (value, b"")))[1:] == [value, b""]


def test_a_text_that_is_too_long_is_cut_and_a_broken_one_is_mended():
    sent = RankFailed(0, "x" * (1 << 17), "", "", "\udcff")
    came = decode(encode(sent), FromRank)
    assert len(came.text) == 1 << 16
    assert came.shown == "?"


def test_values_come_back_with_tuples():
    value = (1, 2.5, True, None, "text", b"\x00\xff", ((), (1,)))
    assert from_msgpack(pack_value(value, "x")) == value
    assert from_msgpack(pack_value([1, [2]], "x")) == (1, (2,))


def test_a_value_that_cannot_travel_is_refused_by_name(monkeypatch):
    with raises(ValueError):
        pack_value(object(), "plan")
    with raises(ValueError):
        pack_value(1 << 70, "plan")
    monkeypatch.setattr(messages, "MOST_FRAME_BYTES", 10)
    with raises(ValueError):
        pack_value(bytes(11), "plan")


@given(st.binary(max_size=64))
def test_bytes_at_random_are_a_value_or_refused(data):
    with contextlib.suppress(DecodeError):
        from_msgpack(data)


def test_every_message_has_fields_that_travel():
    of_ranks = (*FromRank.__args__, *ToRank.__args__)
    of_agents = (*FromAgent.__args__, *ToAgent.__args__)
    for kind in (*of_ranks, *of_agents):
        home = agent_messages if kind in of_agents else messages
        assert kind.__module__ == home.__name__
        assert {field.type for field in dataclasses.fields(kind)} <= FIELDS.keys()
    assert StepReached.__slots__ == ("run", "step", "waited_us")
