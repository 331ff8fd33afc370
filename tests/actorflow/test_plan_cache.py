import importlib

import pytest

import actorflow as af
from actorflow import nn
from actorflow.plan_cache import PlanCache
from compiler.types import DType, TensorType

SPEC = {"x": TensorType(DType.FLOAT32, (4, 3))}


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Count real compilations, with a cache directory of the test's own."""
    monkeypatch.setenv("ACTORFLOW_CACHE", str(tmp_path / "cache"))
    count = []
    job_module = importlib.import_module("actorflow.job")  # af.job is the decorator
    real = job_module.compile_graph

    def counting(*arguments):
        count.append(1)
        return real(*arguments)

    monkeypatch.setattr(job_module, "compile_graph", counting)
    return count


def fresh_job(rate=0.1):
    @af.job(optimizer=af.optim.SGD(rate))
    def train(model, batch):
        return model(batch.x).mean()

    return train


def test_a_second_process_takes_the_plan_from_disk(compiles):
    one, two = (fresh_job().compile(nn.Linear(3, 2), SPEC) for _ in range(2))
    assert one == two
    assert len(compiles) == 1


def test_one_job_compiles_once_per_signature(compiles, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CACHE", "off")
    train, model = fresh_job(), nn.Linear(3, 2)
    assert train.compile(model, SPEC) is train.compile(model, SPEC)
    train.compile(model, SPEC, every=10)
    assert len(compiles) == 2


def test_anything_that_changes_the_plan_changes_the_key(compiles):
    fresh_job(0.1).compile(nn.Linear(3, 2), SPEC)
    fresh_job(0.2).compile(nn.Linear(3, 2), SPEC)
    fresh_job(0.1).compile(nn.Linear(3, 2, bias=False), SPEC)
    fresh_job(0.1).compile(nn.Linear(3, 2), {"x": TensorType(DType.FLOAT32, (5, 3))})
    assert len(compiles) == 4


def test_a_damaged_file_is_reported_and_compiled_anew(compiles, tmp_path, caplog):
    for _ in range(2):
        fresh_job().compile(nn.Linear(3, 2), SPEC)
        (file,) = (tmp_path / "cache").rglob("*.plan")
        file.write_bytes(file.read_bytes()[:-9])
    assert len(compiles) == 2
    assert "compiling again" in caplog.text


def test_an_unwritable_cache_is_reported_and_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    told = []
    plan = fresh_job().compile(nn.Linear(3, 2), SPEC)
    PlanCache(blocked / "cache", told.append).store("k", plan)
    assert len(told) == 1
    assert str(blocked) in told[0]


def test_a_cache_that_is_off_keeps_nothing():
    cache = PlanCache(None, print)
    cache.store("k", fresh_job().compile(nn.Linear(3, 2), SPEC))
    assert cache.find("k") is None
