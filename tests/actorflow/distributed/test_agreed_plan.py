"""Ranks agree on plans, each a thread of this process: who compiles, and what the others take."""

from dataclasses import replace

import numpy as np
import pytest
from error_texts import raises
from rank_threads import RankThreads

import actorflow as af
from actorflow import nn
from actorflow.compile.compiling import JobSpec, cache_plan, compiled_plan
from actorflow.compile.hardware import hardware_for
from actorflow.distributed import agreed_plan as agreeing
from actorflow.distributed.agreed_plan import plan_for
from actorflow.distributed.process_group import ProcessGroup
from actorflow.environment.settings import Settings
from actorflow.jobs.job_spec import compile_options, evaluation_graph
from actorflow.options.run_spec import PlanOptions
from compiler.contract.errors import BudgetError, CompileError, OutOfMemory, PlanFormatError
from compiler.contract.placement import HOST, INSIDE_A_HOST, joined
from compiler.contract.plan import Plan


class Net(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 3)

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)


def loss(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


def loss_times(factor):
    def loss(model, batch):
        return factor * af.cross_entropy(model(batch.x), batch.y)

    return loss


def source(rows):
    x = np.linspace(-1, 1, 24 * 8, dtype=np.float32).reshape(24, 8)
    return af.data.ArraySource({"x": x, "y": np.arange(24) % 3}, batch=rows)


def asked_by(rank, mesh, cache=None, rows=6, evaluated_rows=0, factor=1.0, **options):
    """Return what a rank of a mesh compiles."""
    job = af.job(optimizer=af.optim.SGD(0.1), mesh=mesh, **options)(loss_times(factor))
    model, settings = Net(), Settings.from_env({"ACTORFLOW_CACHE": str(cache or "off")})
    evaluation = evaluated = None
    graph = job.graph(model, source(rows).spec())
    if evaluated_rows:
        reports = af.job(train=False)(lambda model, batch: {"loss": loss(model, batch)})
        evaluation = af.Evaluation(reports, source(evaluated_rows), every=2, batches=1)
        evaluated = evaluation_graph(evaluation, model, (HOST,), graph)
    hardware = hardware_for((HOST,), ranks=joined(mesh, INSIDE_A_HOST, rank))
    call = PlanOptions(evaluation=evaluation)
    wanted = compile_options(job.name, job.options, call, hardware)
    return JobSpec(graph, hardware, wanted, settings, job.options, graph, evaluated)


class Compiling:
    """Plans that the ranks of a mesh agree on; `by` is who compiled, by `compile_plan`."""

    def __init__(self, monkeypatch):
        self.by, self.sent, self.compile_plan = [], lambda data: data, agreeing.compiled_plan
        self.are_measuring = set()
        monkeypatch.setattr(agreeing, "compiled_plan", self._compiled)

    def _compiled(self, request, local=None):
        self.by.append(request.hardware.ranks.rank)
        self.are_measuring.add(not request.job.deterministic)
        return self.compile_plan(request, local)

    def run(self, mesh, request=asked_by, plans=None):
        ranks = RankThreads(mesh.num_ranks)
        self.threads = ranks

        def gather(rank):
            inner = ranks.gather(rank)

            def gathered(name, value):
                if "have the plan" in name:
                    value = (self.sent(value[0]), value[1])
                return inner(name, value)

            return gathered

        def one(rank):
            group = ProcessGroup(rank, gather(rank))
            return plan_for(request(rank, mesh), {} if plans is None else plans[rank], group)

        self.by.clear()
        return ranks.run(one)


@pytest.fixture
def compiling(monkeypatch):
    return Compiling(monkeypatch)


@pytest.mark.parametrize(
    ("axes", "rows", "by"),
    [
        ({"data": 4}, 8, [0]),
        ({"data": 3}, 7, [0, 1]),  # the first has three rows
        ({"stage": 2}, 6, [0, 1]),
        ({"stage": 2, "data": 2}, 6, [0, 2]),
    ],
)
def test_the_first_rank_of_a_class_compiles_what_each_would(compiling, axes, rows, by):
    def request(rank, mesh):  # what is measured twice may have two answers
        return asked_by(rank, mesh, rows=rows, deterministic=True)

    mesh = af.Mesh(**axes)
    plans = compiling.run(mesh, request)
    assert sorted(compiling.by) == by
    for rank, plan in enumerate(plans):
        assert plan.to_bytes() == plan_for(request(rank, mesh), {}, None).to_bytes()


@pytest.mark.parametrize(
    ("axes", "rows", "is_measured"),
    [
        ({"data": 4}, 8, True),
        ({"data": 3}, 7, False),
        ({"stage": 2}, 6, True),
        ({"stage": 2, "data": 2}, 6, True),
        ({"stage": 2, "data": 2}, 7, False),
    ],
)
def test_classes_that_have_a_variable_in_common_measure_no_products(
    compiling, tmp_path, axes, rows, is_measured
):
    """What both make of it would have other bits where one of them found another one faster."""

    def request(rank, mesh):
        return asked_by(rank, mesh, tmp_path / str(rank), rows=rows)

    mesh = af.Mesh(**axes)
    for rank in range(mesh.num_ranks):
        (tmp_path / str(rank)).mkdir()
    compiling.run(mesh, request)
    assert compiling.are_measuring == {is_measured}
    compiling.run(mesh, request)
    assert compiling.by == []


def test_ranks_that_evaluate_uneven_parts_are_told_apart(compiling):
    def request(rank, mesh):
        return asked_by(rank, mesh, evaluated_rows=3, deterministic=True)

    mesh = af.Mesh(data=2)
    plans = compiling.run(mesh, request)
    assert sorted(compiling.by) == [0, 1]
    alone = [plan_for(request(rank, mesh), {}, None) for rank in range(2)]
    assert plans == alone
    assert plans[0] != plans[1]


@pytest.mark.parametrize("has", [[], [0], [1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_who_has_a_plan_changes_no_meeting_of_the_ranks(compiling, has):
    """And nobody compiles where one of the class need not."""
    mesh, plans = af.Mesh(data=3), [{} for _ in range(3)]
    for rank in has:
        request = asked_by(rank, mesh)
        with request.choosing():
            plans[rank][request.key] = compiled_plan(request)
    found = compiling.run(mesh, plans=plans)
    assert compiling.by == ([] if has else [0])
    assert len({plan.to_bytes() for plan in found}) == 1
    assert compiling.run(mesh, plans=plans) == found
    assert compiling.by == []
    assert {len(said) for said in compiling.threads.said.values()} == {3}


def test_a_plan_that_a_rank_compiled_by_itself_is_not_the_one_that_all_agree_on(
    compiling, tmp_path
):
    """It was chosen by measurements of its own, which may differ."""

    def request(rank, mesh):
        return asked_by(rank, mesh, tmp_path)

    mesh, plans = af.Mesh(data=2), [{}, {}]
    alone = [plan_for(request(rank, mesh), plans[rank], None) for rank in range(2)]
    compiling.run(mesh, request, plans)
    assert compiling.by == [0]
    assert [plan_for(request(rank, mesh), plans[rank], None) for rank in range(2)] == alone


@pytest.mark.parametrize("axes", [{"data": 2}, {"stage": 2, "data": 2}])
def test_of_different_plans_on_disk_all_of_a_class_take_that_of_its_first(
    compiling, tmp_path, axes
):
    """Two launches at a time may have kept them in turn."""

    def request(rank, mesh):
        return asked_by(rank, mesh, tmp_path)

    mesh = af.Mesh(**axes)
    first = compiling.run(mesh, request)
    last = mesh.num_ranks - 1
    one = request(last, mesh)
    other = replace(first[last], options=(*first[last].options, ("of_another_launch", 1)))
    with one.choosing():
        cache_plan(one, other)
    found = compiling.run(mesh, request)
    assert compiling.by == []
    assert [plan.fingerprint for plan in found] == [plan.fingerprint for plan in first]


def test_what_is_sent_is_kept_on_the_disk_of_each(compiling, tmp_path):
    def request(rank, mesh):
        return asked_by(rank, mesh, tmp_path / str(rank))

    (tmp_path / "0").mkdir()
    mesh = af.Mesh(data=2)
    first = compiling.run(mesh, request)
    assert compiling.by == [0]
    assert compiling.run(mesh, request) == first
    assert compiling.by == []
    for rank in range(2):
        assert list((tmp_path / str(rank)).glob("*.plan"))


@pytest.mark.parametrize("kind", [CompileError, OutOfMemory])
def test_what_the_compiling_rank_meets_with_is_raised_on_all(compiling, kind):
    def failing(request, local=None):
        raise kind("x.py:3: too large")

    compiling.compile_plan = failing
    with raises(kind):
        compiling.run(af.Mesh(data=3))
    raised = compiling.threads.errors
    assert [(type(raised[rank]), str(raised[rank])) for rank in range(3)] == [
        (kind, "x.py:3: too large")
    ] * 3


def test_of_budgets_that_are_too_small_all_hear_of_the_largest_one_needed(compiling):
    def failing(request, local=None):
        size = 300 - 100 * request.hardware.ranks.rank
        raise BudgetError(f"needs {size}", smallest_bytes=size)

    compiling.compile_plan = failing
    with pytest.raises(BudgetError):
        compiling.run(af.Mesh(data=3), lambda rank, mesh: asked_by(rank, mesh, rows=7))
    raised = [compiling.threads.errors[rank] for rank in range(3)]
    assert [(type(error), str(error), error.smallest_bytes) for error in raised] == [
        (BudgetError, "needs 300", 300)
    ] * 3


def test_a_layout_that_cannot_be_is_refused_on_all_ranks(compiling):
    with raises(CompileError):
        compiling.run(af.Mesh(data=4), lambda rank, mesh: asked_by(rank, mesh, rows=3))
    assert [type(compiling.threads.errors[rank]) for rank in range(4)] == [CompileError] * 4
    assert compiling.by == []


def test_ranks_with_other_jobs_compile_nothing(compiling):
    def request(rank, mesh):
        return asked_by(rank, mesh, factor=0.5 + rank)

    with raises(CompileError):
        compiling.run(af.Mesh(data=2), request)
    assert compiling.by == []


def foreign(data):
    return replace(Plan.from_bytes(data), graph_hash="0" * 32).to_bytes() if data else data


def of_another_mesh(data):
    return plan_for(asked_by(0, af.Mesh(data=3)), {}, None).to_bytes() if data else data


@pytest.mark.parametrize("sent", [lambda data: data[:-9], foreign, of_another_mesh])
def test_what_is_sent_is_not_trusted(compiling, sent):
    compiling.sent = sent
    with raises(PlanFormatError):
        compiling.run(af.Mesh(data=2))
