"""Whole variables of the parts that ranks have, as threads of this process."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiers
from error_texts import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import RankThreads

from actorflow.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from actorflow.distributed.unshard import all_gather_variables, shard_values
from compiler.contract.errors import InternalError
from compiler.contract.placement import Mesh
from compiler.contract.sbp import shard_slices
from compiler.contract.types import ShardingSpec


class Meeting(RankThreads):
    """Ranks as threads, and how many bytes each told the others."""

    def __init__(self, count):
        super().__init__(count)
        self.told = [0] * count

    def group(self, rank):
        gather = self.gather(rank)

        def counted(name, value):
            self.told[rank] += len(value) if isinstance(value, bytes) else 0
            return gather(name, value)

        return ProcessGroup(rank, counted)


def on_ranks(count, do):
    """Return what do(among) returns on each rank, and where they met."""
    meeting = Meeting(count)
    return meeting.run(lambda rank: do(meeting.group(rank))), meeting


def plan_of(mesh, parts):
    """Return what is asked of a plan here: its mesh, and its variables with their parts."""
    state = [SimpleNamespace(name=name, sharding=part) for name, part in parts.items()]
    return SimpleNamespace(state=tuple(state), mesh=mesh)


def values_of(shapes):
    rng = np.random.default_rng(1)
    dtypes = ("float32", "int64", "bool", "float64", "float16")
    return {
        name: np.asarray(rng.integers(0, 9, shape)).astype(dtypes[i % 5])
        for i, (name, shape) in enumerate(shapes.items())
    }


@st.composite
def held(draw):
    """Return a mesh, and variables with how they are split over it."""
    extents = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = Mesh(tuple("abc"[: len(extents)]), tuple(extents))
    parts = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        axes = draw(st.lists(st.sampled_from(mesh.names), unique=True))
        splits = [(name, draw(st.integers(0, len(shape) - 1))) for name in axes if shape]
        parts[f"v{number}"] = ShardingSpec(shape, tuple(splits))
    return mesh, parts


@settings(max_examples=tiers.examples(40))
@given(case=held(), message_bytes=st.sampled_from([1, 16, 1 << 20]))
def test_all_ranks_have_the_wholes_whose_parts_they_had(case, message_bytes):
    mesh, parts = case
    whole = values_of({name: part.shape for name, part in parts.items()})
    plan = plan_of(mesh, {name: part if part.splits else None for name, part in parts.items()})

    def one(group):
        own = shard_values(plan, whole, group.rank)
        for name, part in parts.items():
            want = whole[name][shard_slices(part, mesh, group.rank)]
            np.testing.assert_array_equal(own[name], want)
        return all_gather_variables(
            plan, own, group.all_gather_object, group.rank, message_bytes=message_bytes
        )

    found, meeting = on_ranks(mesh.num_ranks, one)
    for own in found:
        assert own.keys() == whole.keys()
        for name, array in own.items():
            assert (array.dtype, array.shape) == (whole[name].dtype, whole[name].shape)
            np.testing.assert_array_equal(array, whole[name])
    told = sum([whole[name].nbytes for name, part in parts.items() if part.splits])
    assert sum(meeting.told) == told, "each element is told once"


def test_what_only_some_ranks_have_comes_to_all():
    mesh = Mesh(("stage", "model"), (2, 2))
    up, down = np.arange(12.0).reshape(4, 3), np.arange(5)
    of_stage = [
        {"up": ShardingSpec((4, 3), (("model", 0),)), "step": None},
        {"down": None, "step": None},
    ]
    values = {"up": up, "down": down, "step": np.asarray(7)}

    def one(group):
        plan = plan_of(mesh, of_stage[group.rank // 2])
        own = {name: values[name] for name in of_stage[group.rank // 2]}
        return all_gather_variables(
            plan, shard_values(plan, own, group.rank), group.all_gather_object, group.rank
        )

    found, meeting = on_ranks(4, one)
    for own in found:
        assert own.keys() == values.keys()
        np.testing.assert_array_equal(own["up"], up)
        np.testing.assert_array_equal(own["down"], down)
    assert meeting.told == [up.nbytes // 2, up.nbytes // 2, down.nbytes, 0]


def test_what_all_have_whole_is_handed_back_and_not_told():
    plan, value = plan_of(Mesh(("data",), (3,)), {"w": None}), np.arange(6.0)
    found, meeting = on_ranks(
        3, lambda a: all_gather_variables(plan, {"w": value}, a.all_gather_object, a.rank)
    )
    assert all(own["w"] is value for own in found)
    assert meeting.told == [0, 0, 0]


def test_small_variables_share_their_messages():
    mesh = Mesh(("data",), (2,))
    parts = {f"v{i}": ShardingSpec((4,), (("data", 0),)) for i in range(40)}
    plan, whole = plan_of(mesh, parts), values_of(dict.fromkeys(parts, (4,)))

    def one(group):
        return all_gather_variables(
            plan, shard_values(plan, whole, group.rank), group.all_gather_object, group.rank
        )

    _, meeting = on_ranks(2, one)
    assert len(meeting.said) == 2  # the table, and one message


def test_one_rank_alone_has_its_own():
    plan, value = plan_of(Mesh((), ()), {"w": None}), np.arange(3)
    group = SINGLE_PROCESS
    assert (
        all_gather_variables(plan, {"w": value}, group.all_gather_object, group.rank)["w"] is value
    )
    assert shard_values(plan, {"w": value}, 0)["w"] is value


def test_ranks_that_have_other_variables_of_one_name_are_told_which():
    plan = plan_of(Mesh(("data",), (2,)), {"w": None})
    values = [np.zeros(3, np.float32), np.zeros(4, np.float32)]
    with raises(InternalError):
        on_ranks(
            2,
            lambda a: all_gather_variables(
                plan, {"w": values[a.rank]}, a.all_gather_object, a.rank
            ),
        )


def test_a_part_of_another_size_than_the_plan_says_is_a_bug():
    plan = plan_of(Mesh(("data",), (2,)), {"w": ShardingSpec((4,), (("data", 0),))})
    with raises(InternalError):
        on_ranks(
            2, lambda a: all_gather_variables(plan, {"w": np.zeros(4)}, a.all_gather_object, a.rank)
        )


def test_parts_of_ranks_that_are_not_there_are_missed():
    plan = plan_of(Mesh(("data",), (2,)), {"w": ShardingSpec((4,), (("data", 0),))})
    with raises(InternalError):
        all_gather_variables(plan, {"w": np.zeros(2)}, SINGLE_PROCESS.all_gather_object, 0)


def test_a_rank_that_fails_fails_all():
    plan = plan_of(Mesh(("data",), (2,)), {"w": ShardingSpec((4,), (("data", 0),))})

    def one(group):
        if group.rank:
            raise OSError("gone")
        return all_gather_variables(plan, {"w": np.zeros(2)}, group.all_gather_object, 0)

    with pytest.raises(OSError, match="gone"):
        on_ranks(2, one)
