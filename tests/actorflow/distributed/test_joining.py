"""Parts of variables on their way to the first rank, as threads of this process."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from error_texts import raises
from rank_threads import RankThreads

from actorflow.distributed.process_group import ProcessGroup
from actorflow.distributed.unshard import (
    LocalShard,
    ShardGatherer,
    ShardTransfer,
    check_cover,
    shard_values,
)
from compiler.contract.errors import InternalError, PeerFailed
from compiler.contract.placement import Mesh
from compiler.contract.types import ShardingSpec

SHAPES = {
    "rows": (5, 3), "columns": (4, 6), "blocks": (3, 4, 5), "empty": (0, 2), "step": (),
    "scale": (), "one": (1,), "ones": (1, 1, 1), "gains": (3,),
}  # fmt: skip
NAMES = ("rows", "columns", "blocks", "empty", "step")
SPLITS = {
    "rows": (("data", 0),),
    "columns": (("model", 1),),
    "blocks": (("data", 1), ("model", 2)),
    "empty": (("data", 1),),
}
MESH = Mesh(("data", "model"), (2, 2))


def plan_of(mesh=MESH, splits=SPLITS, names=NAMES):
    """Return what is asked of a plan here."""
    parts = {name: ShardingSpec(SHAPES[name], splits[name]) for name in names if name in splits}
    state = [SimpleNamespace(name=name, sharding=parts.get(name)) for name in names]
    return SimpleNamespace(state=tuple(state), mesh=mesh)


def shards_of(plan):
    return [
        LocalShard(v.name, "float32", SHAPES[v.name], v.sharding.splits if v.sharding else ())
        for v in sorted(plan.state, key=lambda v: v.name)
    ]


def wholes(seed):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=s), np.float32) for name, s in SHAPES.items()}


def poisoned(shape, dtype):
    """Memory that was not written reads as NaN."""
    return np.full(shape, np.nan, dtype)


def on_ranks(do, count=4, plans=None, wait_s=60.0, **options):
    """Return what do(joining, plan, rank) returns by rank."""
    ranks = RankThreads(count)

    def one(rank):
        plan = plans[rank] if plans else plan_of()
        group, named = ProcessGroup(rank, ranks.gather(rank)), {"allocate": poisoned, **options}
        own = ShardGatherer(plan.mesh, shards_of(plan), group, wait_s, **named)
        try:
            return do(own, plan, rank)
        finally:
            own.close()

    return ranks.run(one)


def shared(own, plan, rank, step=1):
    arrays = shard_values(plan, wholes(step), rank)
    if rank:
        return own.send_shards(step, arrays)
    joined = own.gather_shards(step, {v.name: arrays[v.name] for v in plan.state})
    return {name: array.copy() for name, array in joined.items()}


@pytest.mark.parametrize("pipe_bytes", [4096, 1 << 20])
def test_the_first_rank_has_the_wholes_of_each_snapshot(pipe_bytes):
    def some(own, plan, rank):
        return [shared(own, plan, rank, step) for step in (1, 2, 5)]

    for step, found in zip((1, 2, 5), on_ranks(some, pipe_bytes=pipe_bytes)[0], strict=True):
        assert found.keys() == {*NAMES}
        for name, array in found.items():
            np.testing.assert_array_equal(array, wholes(step)[name], err_msg=name)


def test_a_part_larger_than_a_pipe_goes_through_it(monkeypatch):
    monkeypatch.setitem(SHAPES, "large", (1 << 20, 3))
    plans = [plan_of(Mesh(("data",), (2,)), {"large": (("data", 0),)}, ("large",))] * 2
    found = on_ranks(shared, 2, plans)[0]
    np.testing.assert_array_equal(found["large"], wholes(1)["large"])


def test_variables_of_other_stages_come_too():
    mesh = Mesh(("stage",), (2,))
    plans = [plan_of(mesh, {}, ("rows", "step")), plan_of(mesh, {}, ("columns", "step"))]

    def one(own, plan, rank):
        assert own.size_bytes == 4 * (15 + 24)
        arrays = {v.name: wholes(1)[v.name] for v in plan.state}
        return own.send_shards(1, arrays) if rank else own.gather_shards(1, arrays)

    found = on_ranks(one, 2, plans)[0]
    assert found.keys() == {"rows", "columns", "step"}
    np.testing.assert_array_equal(found["columns"], wholes(1)["columns"])


@pytest.mark.parametrize("later", [1, 2])
@pytest.mark.parametrize("name", ["scale", "one", "ones", "gains", "empty", "columns"])
def test_a_variable_of_any_shape_comes_from_a_later_stage_alone(name, later):
    mesh = Mesh(("stage",), (3,))
    plans = [plan_of(mesh, {}, ("rows", "step", *[name] * (r == later))) for r in range(3)]

    def one(own, plan, rank):
        told = []
        for step in (1, 2):
            arrays = {v.name: wholes(step)[v.name] for v in plan.state}
            whole = own.send_shards(step, arrays) if rank else own.gather_shards(step, arrays)
            told.append(None if rank else whole[name].copy())
        return told

    for step, found in zip((1, 2), on_ranks(one, 3, plans)[0], strict=True):
        np.testing.assert_array_equal(found, wholes(step)[name])


def test_a_part_that_comes_to_a_copy_is_a_bug():
    """What was not written must never be saved."""

    class Copied(np.ndarray):
        def __getitem__(self, key):
            return np.array(super().__getitem__(key))

    def allocate(shape, dtype):
        return np.zeros(shape, dtype).view(Copied)

    def one(own, plan, rank):
        if rank == 0:
            with raises(InternalError):
                own.gather_shards(1, {})
        else:
            own.send_shards(1, {"scale": wholes(1)["scale"]})

    mesh = Mesh(("stage",), (2,))
    plans = [plan_of(mesh, {}, ()), plan_of(mesh, {}, ("scale",))]
    on_ranks(one, 2, plans, allocate=allocate)


TILES = {
    "a row is missing": [((0, 2), (0, 3)), ((3, 5), (0, 3))],
    "a row comes twice": [((0, 3), (0, 3)), ((2, 5), (0, 3))],
    "a corner is missing": [((0, 5), (0, 2)), ((0, 4), (2, 3))],
    "the end is missing": [((0, 4), (0, 3))],
    "nothing comes": [],
    "all comes twice": [((0, 5), (0, 3)), ((0, 5), (0, 3))],
}


@pytest.mark.parametrize("parts", TILES.values(), ids=TILES)
def test_parts_that_do_not_make_up_the_whole_are_a_bug(parts):
    held = LocalShard("x", "float32", (5, 3), ())
    with raises(InternalError):
        check_cover(
            "x", (5, 3), [ShardTransfer(held, tuple([slice(*rows) for rows in p])) for p in parts]
        )


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_ends_is_missed_by_name(who):
    told = {}

    def one(own, plan, rank):
        if rank == who:
            return
        try:
            # What it tells fits into its pipe, and is told to nobody.
            while True:
                shared(own, plan, rank)
        except PeerFailed as error:
            told[rank] = error

    on_ranks(one)
    if who:
        assert told[0].rank == who
        assert "rank 2 ended before it sent its shards of a checkpoint" in str(told[0])
    for rank in {1, 2, 3} - {who}:
        assert told[rank].rank == 0
        assert "rank 0 ended" in str(told[rank])


def test_a_rank_that_says_nothing_is_missed_in_time():
    done = threading.Event()

    def one(own, plan, rank):
        if rank == 0:
            with raises(PeerFailed) as caught:
                shared(own, plan, 0)
            done.set()
            assert caught.value.rank == 1
        assert done.wait(60)

    on_ranks(one, wait_s=0.01)


def test_who_waits_is_stopped():
    def one(own, plan, rank):
        own.stop("the job is over")
        own.stop("another reason")
        with raises(PeerFailed):
            shared(own, plan, rank)

    on_ranks(one)


def test_another_step_than_the_first_ranks_is_a_bug():
    with raises(InternalError):
        on_ranks(lambda own, plan, rank: shared(own, plan, rank, 1 + (rank == 1)))


def test_an_array_of_another_size_than_the_plan_says_is_a_bug():
    def one(own, plan, rank):
        arrays = {name: np.zeros((1, 1), np.float32) for name in SHAPES}
        return own.send_shards(1, arrays) if rank else own.gather_shards(1, arrays)

    with pytest.raises(InternalError, match="and the shard of this rank is"):
        on_ranks(one)


def test_what_all_have_whole_takes_no_memory_and_no_pipe():
    plans = [plan_of(Mesh(("data",), (2,)), {}, ("rows",))] * 2

    def one(own, plan, rank):
        arrays = wholes(1)
        assert own.size_bytes == 0
        if rank:
            return own.send_shards(1, arrays)
        assert own.gather_shards(1, {"rows": arrays["rows"]})["rows"] is arrays["rows"]
        return None

    on_ranks(one, 2, plans)
