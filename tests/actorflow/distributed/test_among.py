"""Runs of ranks that have parts of variables and batches, each rank a thread of this process."""

import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from error_texts import raises
from rank_plans import chain_plan, reduced
from rank_threads import RankThreads

import actorflow as af
from actorflow import nn
from actorflow.checkpoint.manager import CheckpointManager
from actorflow.data import ArraySource, DataError, from_arrays
from actorflow.distributed import member as member_module
from actorflow.distributed.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    check_same_data,
    check_same_plan,
    sizes_of_hosts,
)
from actorflow.environment.settings import Settings
from actorflow.run.live_variables import numbers_of_rows
from actorflow.tensor.initial_values import initial_values
from compiler.contract.errors import CompileError, DeviceError, InternalError
from compiler.contract.placement import INSIDE_A_HOST, Hosts, MeshLink, joined
from compiler.contract.types import DType, ShardingSpec, TensorType
from compiler.pipeline.printer import summarise

HALF = ShardingSpec((8, 6), (("data", 0),))
ROWS = ShardingSpec((4, 6), (("data", 0),))
X = np.linspace(-1, 1, 40 * 6, dtype=np.float32).reshape(40, 6)


@af.job(optimizer=af.optim.SGD(0.5, momentum=0.9))
def train(model, batch):
    return (model(batch.x) ** 2).mean()


def compiled(**options):
    """Return the plan of a rank that has four of eight rows of the weight, and half of a batch.

    Without a transport its gradients are its own: what it trains is its half alone.
    """
    model = nn.Linear(6, 4, bias=False)
    return train.compile(model, {"x": TensorType(DType.FLOAT32, (2, 6))}, **options)


def of_two(plan, *, splits_state=True):
    parts = {"weight": HALF, "momentum/weight": HALF} if splits_state else {}
    names = {v.name for v in plan.variables}
    assert {*parts} <= names, names
    variables = [replace(v, sharding=parts.get(v.name)) for v in plan.variables]
    fields = [replace(f, sharding=ROWS) if f.name == "x" else f for f in plan.fields]
    return replace(
        plan,
        variables=tuple(variables),
        fields=tuple(fields),
        options=(*plan.options, ("mesh", (("data", 2),))),
    )


@pytest.fixture(scope="module")
def plan():
    return compiled()


def source(batch=4, seed=3):
    return ArraySource({"x": X}, batch=batch, seed=seed)


def on_ranks(do, *, are_members=False):
    ranks = RankThreads(2)
    members = ranks.members() if are_members else [None, None]
    return ranks.run(lambda rank: do(ProcessGroup(rank, ranks.gather(rank), members[rank])))


def halves(rank_plan, plan, steps):
    """Return what two ranks come to, each run by itself on its half of everything."""
    found = []
    for rank in range(2):
        first = dict(initial_values(rank_plan, {}, 0, rank))
        runner, data = af.Runner(plan, values=first), source()
        for _ in range(steps):
            runner.step({"x": next(data)["x"][2 * rank : 2 * rank + 2]})
        found.append(runner.variables())
        runner.close()
    return {name: [own[name] for own in found] for name in found[0]}


@pytest.fixture(scope="module")
def expected(plan):
    return halves(of_two(plan), plan, 4)


def assert_whole(variables, expected):
    for name in ("weight", "momentum/weight"):
        np.testing.assert_array_equal(variables[name], np.concatenate(expected[name]))
    assert int(variables["step"]) == 4


def test_fit_comes_to_whole_variables_on_all_ranks(plan, expected):
    def one(group):
        runner = af.Runner(of_two(plan), group=group)
        result = runner.fit(source(), steps=4, progress=False)
        return result.variables, runner.variables()

    for result, variables in on_ranks(one):
        assert_whole(result, expected)
        assert_whole(variables, expected)


def test_hosts_have_ranks_that_follow_each_other():
    assert sizes_of_hosts(("a", "a", "b")) == (2, 1)
    assert sizes_of_hosts(()) == ()
    with raises(CompileError):
        sizes_of_hosts(("a", "b", "a"))


def test_a_job_is_compiled_for_the_hosts_of_its_launched_ranks(monkeypatch):
    members = SimpleNamespace(
        rank=2,
        local_rank=0,
        num_ranks=3,
        epoch=1,
        host="b",
        hosts=("a", "a", "b"),
        all_gather_object=None,
    )
    monkeypatch.setattr(member_module, "_given", [members])
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("ACTORFLOW_LINK", "12.5:5")
    job = af.job(train=False, mesh=af.Mesh(data=3))(lambda model, batch: model(batch.x))
    ranks = job.ranks()
    assert (ranks.rank, ranks.hosts) == (2, Hosts((2, 1), INSIDE_A_HOST, MeshLink(12.5, 5_000.0)))
    members.hosts = ()
    assert job.ranks() == joined(job.mesh, INSIDE_A_HOST, 2)


def test_the_plan_of_a_rank_tells_which_hosts_it_is_for(plan):
    hosts = ("hosts", ((1,), (10.0, 1e4), (1.25, 3e4)))
    one = replace(of_two(plan), options=(*of_two(plan).options, hosts))
    assert (
        "mesh data=2 on hosts of 1 ranks (10 GB/s and 10 us a message inside, 1.25 GB/s and 30 us a"
        " message between them), which has"
    ) in summarise(one)[1]


def test_the_plan_of_a_rank_tells_what_it_has_of_the_whole(plan):
    lines = summarise(of_two(plan))
    told = (
        "for one rank of the mesh data=2, which has parts of 2 of 3 variables and its part of 'x'"
    )
    assert lines[1].strip() == told
    assert not any("mesh" in line for line in summarise(plan))


def test_an_entry_that_an_evaluation_has_as_well_is_told_once(plan):
    one = of_two(plan)
    again = [replace(field, name="x") for field in one.fields if field.sharding is not None]
    assert summarise(replace(one, fields=(*one.fields, *again)))[1].endswith("its part of 'x'")


def test_a_run_goes_on_from_what_all_ranks_came_to(plan, expected):
    def one(group):
        runner, data = af.Runner(of_two(plan), group=group), source()
        for _ in runner.stream(data, steps=2):
            pass
        for _ in runner.stream(data, steps=2):
            pass
        return runner.variables()

    for variables in on_ranks(one):
        assert_whole(variables, expected)


def test_variables_of_ranks_that_are_stepped_are_read_whole_between_steps(plan, expected):
    def one(group):
        runner, data, seen = af.Runner(of_two(plan), group=group), source(), []
        seen.append(runner.variables())
        for _ in range(4):
            runner.step(next(data))
            seen.append(runner.variables())
        runner.close()
        return seen

    for seen in on_ranks(one):
        assert [int(v["step"]) for v in seen] == [0, 1, 2, 3, 4]
        assert all(v["weight"].shape == (8, 6) for v in seen)
        assert_whole(seen[-1], expected)


def test_what_is_written_is_whole_and_each_rank_takes_its_part(plan):
    whole = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)

    def one(group):
        runner, data = af.Runner(of_two(plan), group=group), source()
        runner.step(next(data))
        with raises(CompileError):
            runner.write({"weight": whole[:4]})
        runner.write({"weight": whole})
        written = runner.variables()["weight"]
        runner.step(next(data))
        moved = runner.variables()["weight"]
        runner.close()
        return written, moved

    for written, moved in on_ranks(one):
        np.testing.assert_array_equal(written, whole)
        assert not np.array_equal(moved, whole)


def test_parts_are_not_read_while_ranks_run_on(plan):
    def one(group):
        runner, said = af.Runner(of_two(plan), group=group), []

        def look(step, outputs):
            with raises(CompileError) as caught:
                runner.variables()
            said.append(str(caught.value))

        runner.fit(source(), steps=2, progress=False, on_step=look)
        return len(said)

    assert on_ranks(one) == [2, 2]


def test_a_rank_that_fails_asks_nobody_for_parts(plan):
    at_end = threading.Event()

    def one(group):
        runner = af.Runner(of_two(plan), group=group)
        first = runner.variables()["weight"]
        if group.rank == 1:
            with raises(DataError):
                runner.step({"x": X[:3]})
            at_end.set()
            runner.close()
        else:
            runner.first()  # as far as its first values the other comes with it
            assert at_end.wait(60)
        np.testing.assert_array_equal(runner.variables()["weight"], first)

    on_ranks(one)


def test_the_first_rank_writes_checkpoints_and_all_go_on_from_them(tmp_path):
    rank_plan = of_two(compiled(every=2), splits_state=False)

    def run(steps):
        def one(group):
            runner = af.Runner(rank_plan, group=group)
            result = runner.fit(source(), steps=steps, checkpoint=tmp_path / "run", every=2,
                                progress=False)  # fmt: skip
            return result.first_step, result.last_step

        return one

    assert on_ranks(run(2), are_members=True) == [(0, 2), (0, 2)]
    assert on_ranks(run(4), are_members=True) == [(2, 4), (2, 4)]
    assert CheckpointManager(tmp_path / "run").steps() == (2, 4)


def test_variables_that_only_number_rows_are_no_state(plan):
    """Such a one is not shown, and each plan of a rank fills in its part of it."""
    rank_plan = of_two(plan)
    weight = next(v for v in rank_plan.variables if v.name == "weight")
    numbers = replace(weight, name="numbers/8", role="numbers", init=(("kind", "numbers"),))
    more = replace(rank_plan, variables=(*rank_plan.variables, numbers))
    first = initial_values(more, {}, 0, rank=1)
    assert {*first} == {"weight", "momentum/weight", "step"}
    rows = first["weight"].shape[0]
    assert numbers_of_rows(more, rank=1)["numbers/8"].tolist() == [*range(rows, 2 * rows)]
    assert {v.name for v in more.state} == {"weight", "momentum/weight", "step"}


def refused(do, text, error=CompileError):
    """Check that do(among) is refused on both ranks."""

    def of(group):
        with pytest.raises(error, match=text):
            do(group)

    on_ranks(of)


def test_ranks_of_other_data_are_refused_on_all():
    check_same_data(SINGLE_PROCESS, source(), 0)
    on_ranks(lambda group: check_same_data(group, source(), 5))
    refused(lambda a: check_same_data(a, source(), a.rank), "rank 1 has seed 1, rank 0 has 0; give")
    other = "rank 1 has other data than rank 0: "
    refused(
        lambda a: check_same_data(a, source(seed=a.rank), 0), f"{other}seed=1 and not seed=0. Each"
    )
    named = [ArraySource({"x": X, "y": X + rank}, batch=4) for rank in range(2)]
    refused(
        lambda a: check_same_data(a, named[a.rank], 0), f"{other}the content of 'y' is another."
    )
    shuffled = [from_arrays({"x": X}).shuffle(rank).batch(4) for rank in range(2)]
    stage = f"passes({len(X)},1,None,1) and not passes({len(X)},0,None,1)"
    refused(lambda a: check_same_data(a, shuffled[a.rank], 0), re.escape(f"{other}{stage}. Each"))
    named = [from_arrays({"x": X, "y": X + rank}).batch(4) for rank in range(2)]
    refused(
        lambda a: check_same_data(a, named[a.rank], 0), f"{other}the content of 'y' is another."
    )
    short = [ArraySource({"x": X[: 40 - rank]}, batch=4) for rank in range(2)]
    refused(lambda a: check_same_data(a, short[a.rank], 0), f"{other}its length is 39 and not 40.")

    def further(group):
        data = source()
        for _ in range(group.rank):
            next(data)
        check_same_data(group, data, 0)

    refused(further, f"{other}it stands at batches=1 and not at batches=0. Each rank")


def test_data_is_agreed_on_before_a_step(plan):
    def fit(group):
        runner = af.Runner(of_two(plan), group=group)
        runner.fit(source(seed=group.rank), steps=1, progress=False)

    def stream(group):
        next(af.Runner(of_two(plan), group=group).stream(source(seed=group.rank), steps=1))

    refused(fit, "rank 1 has other data than rank 0: seed=1")
    refused(stream, "rank 1 has other data than rank 0: seed=1")


def test_ranks_that_would_begin_with_other_values_are_refused_on_all(plan):
    def runner(group, values):
        return af.Runner(of_two(plan), group=group, values=values)

    same = {"weight": np.ones((8, 6), np.float32)}
    ways = (
        lambda runner: runner.fit(source(), steps=1, progress=False),
        lambda runner: next(runner.stream(source(), steps=1)),
        lambda runner: runner.step({"x": X[:4]}),
    )
    for way in ways:
        text = "'weight' begins on rank 1 with other values than on rank 0; give all"
        refused(lambda a, way=way: way(runner(a, {"weight": same["weight"] + a.rank})), text)
        refused(lambda a, way=way: way(runner(a, same if a.rank else {})), text)
        on_ranks(lambda a, way=way: (one := runner(a, same), way(one), one.close()))


def test_ranks_that_would_meet_on_a_device_are_refused_with_the_line():
    @af.job(optimizer=af.optim.SGD(0.5), mesh=af.Mesh(data=2), device="sim")
    def shared(model, batch):
        return (model(batch.x) ** 2).mean()

    model = nn.Linear(6, 4, bias=False)
    plan = shared.compile(model, {"x": TensorType(DType.FLOAT32, (2, 6))}, rank=0)
    group = ProcessGroup(0, lambda name, value: [value] * 2)
    with raises(DeviceError):
        group.communicator(plan, Settings.from_env({}), ())


def test_ranks_of_other_plans_are_refused_on_all(plan):
    rank_plan, other = of_two(plan), replace(of_two(plan), graph_hash="of another script")
    refused(
        lambda group: af.Runner(other if group.rank else rank_plan, group=group),
        "rank 1 runs another job 'train' where rank 0 runs 'train': what was traced is not the",
    )
    refused(
        lambda group: af.Runner(rank_plan, group=group, seed=group.rank),
        "rank 1 has seed 1, rank 0 has 0",
    )


def test_plans_that_do_not_fit_together_are_refused_on_all():
    mesh = (("mesh", (("data", 2),)),)
    one, swapped, like = [
        chain_plan(*[reduced(order, name=f"w{order}") for order in own], options=mesh)
        for own in ((0, 1), (1, 0), (0, 1))
    ]
    like = replace(like, sources=(*like.sources, like.sources[0]))
    on_ranks(lambda group: check_same_plan(group, one, 0))
    on_ranks(lambda group: check_same_plan(group, like if group.rank else one, 0))
    text = "rank 1 runs all_reduce #1 of 'w1' .* where rank 0 runs all_reduce #0 of 'w0'"
    text += r" .*so the script is correct \(this is a bug in actorflow: please report it\)$"
    refused(lambda a: check_same_plan(a, swapped if a.rank else one, 0), text, InternalError)
    text = "job 'job' differently: clip_norm= is 1.0 on rank 1 and none on rank 0; do all ranks run"
    other = replace(swapped, options=(*mesh, ("clip_norm", 1.0)))
    refused(lambda group: check_same_plan(group, other if group.rank else one, 0), text)


def test_ranks_that_are_not_as_many_as_the_mesh_has_are_refused_on_all(plan):
    mesh = ("mesh", (("data", 2), ("model", 2)))
    rank_plan = of_two(plan)
    four = replace(rank_plan, options=(*rank_plan.options[:-1], mesh))
    text = r"'train' is for 4 ranks \(mesh data=2 x model=2\), and 2 run it; launch 4"
    refused(lambda group: af.Runner(four, group=group), text)
