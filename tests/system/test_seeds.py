"""The seed of a job and of a run: the same one gives the same bits, another costs no plan."""

import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from error_texts import raises
from jobs import assert_same

import actorflow as af
from actorflow.environment.default_seed import default_seed


def run(train, model, source, **options):
    rows = []
    result = train.fit(
        model, source, steps=4, progress=False, on_step=lambda step, m: rows.append(m["loss"]),
        **options,
    )  # fmt: skip
    return rows, result


@pytest.fixture
def fitted(mlp, classification, classify):
    """Run a job with a seed on a new model with dropout, on batches in one order."""

    def make(job_seed=0, **options):
        return run(classify(seed=job_seed), mlp(dropout=0.3), classification(), **options)

    return make


def test_two_jobs_of_one_seed_compute_the_same_bits(fitted):
    (rows, one), (again, other), (third, _) = fitted(5), fitted(5), fitted(6)
    assert rows == again
    assert_same(one.variables, other.variables)
    assert rows != third


def test_a_seed_of_a_run_stands_for_that_of_its_job(fitted):
    (rows, one), (again, other) = fitted(5), fitted(0, seed=5)
    assert rows == again
    assert_same(one.variables, other.variables)
    assert fitted(0, seed=0)[0] == fitted(0)[0] != rows


def test_runs_of_several_seeds_share_a_plan(mlp, classification, classify, compiled_graphs):
    train = classify()
    rows = [run(train, mlp(dropout=0.3), classification(), seed=seed)[0] for seed in (1, 2, 1)]
    assert len(compiled_graphs) == 1
    assert rows[0] == rows[2] != rows[1]


def test_a_model_that_has_values_keeps_them(mlp, classification, classify):
    train, firsts = classify(), []
    for seed in (1, 2):
        model = mlp()
        model.load({n: np.ones(p.type.shape, "f4") for n, p in model.named_parameters()})
        firsts.append(run(train, model, classification(), seed=seed)[0][0])
    assert firsts[0] == firsts[1]


def test_a_runner_may_go_on_with_another_seed(mlp, classification, classify):
    plan = classify().compile(mlp(dropout=0.3), classification())
    runner = af.Runner(plan, seed=1)
    first = runner.fit(classification(), steps=1, progress=False)
    assert int(first.variables["seed"]) == 1
    second = runner.fit(classification(), steps=2, progress=False, seed=7)
    assert int(second.variables["seed"]) == 7
    assert second.last_step == 2


def test_a_resumed_run_needs_the_seed_it_began_with(fitted, tmp_path):
    _, whole = fitted(0, seed=3, checkpoint=tmp_path)
    _, again = fitted(0, seed=3, checkpoint=tmp_path)
    assert_same(again.variables, whole.variables)
    with raises(af.CompileError):
        fitted(0, checkpoint=tmp_path)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", 1 << 63, True])
def test_what_is_no_seed_is_an_error(fitted, seed):
    with raises(af.CompileError):
        fitted(seed=seed)


def test_everything_is_seeded_and_torch_where_it_is_there(monkeypatch):
    seeds = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=seeds.append))
    states, before = (random.getstate(), np.random.get_state()), default_seed()
    try:
        assert af.seed_everything(7) == 7
        assert (random.random(), np.random.random()) == (
            random.Random(7).random(), np.random.RandomState(7).random()
        )  # fmt: skip
        assert (default_seed(), seeds) == (7, [7])
        for wrong in (-1, 1 << 32, 1.0):
            with raises(af.CompileError):
                af.seed_everything(wrong)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        af.seed(before)
