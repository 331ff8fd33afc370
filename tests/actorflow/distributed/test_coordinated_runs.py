"""Runs of ranks that have a coordinator, each rank a thread of this process."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import ranks_in_process
from trace_format import read_trace

import actorflow as af
from actorflow import nn
from actorflow.distributed.distributed_run import DistributedRun
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.settings import Settings
from actorflow.run import stopping
from compiler.contract.errors import CompileError, PeerFailed
from compiler.contract.types import DType, TensorType

SPEC = {"x": TensorType(DType.FLOAT32, (8, 4))}


@pytest.fixture
def on_ranks():
    """Run a function on each of two ranks; return what it returned or raised there."""

    def run(one):
        with ranks_in_process.joined(2) as (_, members):
            groups = [ProcessGroup(m.rank, m.all_gather_object, m) for m in members]
            return ranks_in_process.at_once(*[lambda a=group: one(a) for group in groups])

    return run


@pytest.fixture(scope="module")
def plans():
    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
    def train(model, batch):
        return (model(batch.x) ** 2).mean()

    return [train.compile(nn.Linear(4, 4), SPEC, rank=rank, every=1) for rank in (0, 1)]


def batches(seed=0, before=lambda number: None):
    rng, number = np.random.default_rng(seed), 0
    while True:
        number += 1
        before(number)
        yield {"x": rng.normal(size=(8, 4)).astype(np.float32)}


def source(seed=0, before=lambda number: None):
    return af.data.from_iterable(lambda: batches(seed, before), spec=SPEC)


# The data of all ranks


@pytest.mark.parametrize("call", ["fit", "stream", "step"])
def test_ranks_that_shard_their_data_are_refused_with_the_mend(
    on_ranks, plans, call, native_toolchain
):
    def one(group):
        runner, data = af.Runner(plans[group.rank], group=group), source(group.rank)
        if call == "fit":
            runner.fit(data, steps=2, progress=False)
        elif call == "stream":
            list(runner.stream(data, steps=2))
        else:
            for _ in range(2):
                runner.step(next(data))
            runner.close()

    for end in on_ranks(one):
        assert isinstance(end, PeerFailed)
        assert "rank 1 was given another batch for step 1 (" in str(end)
        assert "than rank 0: every rank gives the whole batch of all ranks" in str(end)


@pytest.mark.parametrize("call", ["fit", "stream"])
def test_ranks_that_are_asked_for_other_steps_are_told_before_the_first(on_ranks, plans, call):
    def one(group):
        runner, steps = af.Runner(plans[group.rank], group=group), 3 + group.rank
        if call == "fit":
            runner.fit(source(), steps=steps, progress=False, on_step=pytest.fail)
        else:
            list(runner.stream(source(), steps=steps))

    for end in on_ranks(one):
        assert isinstance(end, CompileError)
        assert "rank 1 has steps 4, rank 0 has 3; give all ranks the same steps=" in str(end)


# Stops


def test_a_loop_that_another_rank_ends_by_leaving_its_own_is_an_error(
    on_ranks, plans, native_toolchain
):
    def one(group):
        outputs = af.Runner(plans[group.rank], group=group).stream(source(), steps=50)
        for number, _ in enumerate(outputs):
            if number == 3 and group.rank == 1:
                return "left"
        return "ended"

    end, left = on_ranks(one)
    assert left == "left"
    assert isinstance(end, CompileError)
    assert "rank 1 left its loop over stream, which ended that of rank 0 after" in str(end)


def test_loops_that_all_ranks_leave_or_whose_data_ends_are_none(on_ranks, plans, native_toolchain):
    def one(group):
        runner, counts = af.Runner(plans[group.rank], group=group), []
        for leaves in (3, 5, 9):
            data = af.data.ArraySource({"x": np.ones((40, 4), np.float32)}, batch=8, epochs=1)
            counts.append(0)
            for _ in runner.stream(data):
                counts[-1] += 1
                if counts[-1] == leaves:
                    break
        return counts

    assert on_ranks(one) == [[3, 5, 5]] * 2


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(stopping, "PATIENCE_S", 0.0)


def stop_at_2(group, is_time=lambda: True):
    def on_step(step, outputs):
        if group.rank == 0 and step == 2:
            assert is_time()
            raise af.StopTraining("enough")

    return on_step


def test_a_stop_waits_for_no_source_where_all_lack_the_same_batch(
    on_ranks, plans, impatient, tmp_path, native_toolchain
):
    never = threading.Event()
    folder = tmp_path / "run"

    def one(group):
        data = source(0, lambda number: number == 3 and never.wait(60))
        options = {"progress": False, "checkpoint": folder, "every": "1h"}
        runner = af.Runner(plans[group.rank], group=group)
        return runner.fit(data, steps=99, on_step=stop_at_2(group), **options).last_step

    ends = on_ranks(one)
    never.set()
    assert ends == [2, 2]
    assert [p.name for p in folder.glob("step-*")] == ["step-0000000002"]


def test_a_stop_waits_for_a_source_whose_batch_another_rank_has_begun(
    on_ranks, plans, impatient, monkeypatch, native_toolchain
):
    has_begun, are_held = threading.Event(), threading.Event()
    say, said = DistributedRun.report_last_started, set()

    def report(run, step):
        say(run, step)
        said.add(run._member.rank)
        if said == {0, 1}:
            are_held.set()

    monkeypatch.setattr(DistributedRun, "report_last_started", report)

    def one(group):
        def before(number):
            if number == 3 and group.rank == 1:
                assert are_held.wait(60)
            if number == 4 and group.rank == 0:  # so its batch 3 is on the way
                has_begun.set()

        runner, seen = af.Runner(plans[group.rank], group=group), source(0, before)
        on_step = stop_at_2(group, lambda: has_begun.wait(60))
        return runner.fit(seen, steps=99, progress=False, on_step=on_step).last_step

    first, second = on_ranks(one)
    assert first == second >= 3


def test_a_stop_that_the_data_of_one_rank_asks_for_is_refused_in_its_own_words(
    on_ranks, plans, native_toolchain
):
    def one(group):
        def before(number):
            if number == 3 and group.rank == 1:
                raise af.StopTraining("late")

        runner = af.Runner(plans[group.rank], group=group)
        runner.fit(source(0, before), steps=9, progress=False)

    for end in on_ranks(one):
        assert isinstance(end, PeerFailed)
        assert "rank 1 ended after step 2 by StopTraining in the data source (late)" in str(end)
        assert "Raise StopTraining in on_step" in str(end)


# Files


def test_the_first_rank_alone_writes_down_metrics(on_ranks, plans, tmp_path, native_toolchain):
    def one(group):
        runner = af.Runner(plans[group.rank], group=group)
        runner.fit(source(), steps=40, progress=False, checkpoint=tmp_path / "run")

    assert on_ranks(one) == [None, None]
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len({json.loads(row)["step"] for row in rows}) == len(rows) > 0


def test_every_rank_has_a_trace_of_its_own(on_ranks, plans, tmp_path, native_toolchain):
    settings = replace(Settings.from_env({}), trace=tmp_path / "trace.json")

    def one(group):
        runner = af.Runner(plans[group.rank], group=group, settings=settings)
        runner.fit(source(), steps=2, progress=False)

    assert on_ranks(one) == [None, None]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["trace.json", "trace.rank1.json"]
    both = [read_trace(file.read_text()) for file in files]
    assert [{event["pid"] for event in events} for events in both] == [{1}, {2}]
    titles = [e["args"]["name"] for events in both for e in events if e["name"] == "process_name"]
    assert [title.partition(" on ")[0] for title in titles] == ["rank 0", "rank 1"]
    # Steps are of both ranks together: no step of one ends before it begins on the other.
    spans = [
        [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"] == "step"]
        for events in both
    ]
    for one, other in zip(*spans, strict=True):
        assert max(one[0], other[0]) < min(one[1], other[1])


def test_every_rank_dumps_its_passes_under_names_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_DUMP", str(tmp_path))

    @af.job(optimizer=af.optim.SGD(0.1), mesh=af.Mesh(data=2))
    def train(model, batch):
        return (model(batch.x) ** 2).mean()

    names = []
    for rank in (0, 1):
        train.compile(nn.Linear(4, 4), SPEC, rank=rank)
        names.append({path.name for path in tmp_path.iterdir()})
    first, both = names
    assert both - first == {name.replace(".txt", ".rank1.txt") for name in first}
