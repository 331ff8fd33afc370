"""Batches of several shapes on several ranks: all switch at the same step, or say which did not."""

import gc
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from launched_threads import launched, on_ranks

import actorflow as af
from actorflow import nn
from actorflow.data import from_iterable

pytestmark = [
    pytest.mark.usefixtures("native_toolchain"),
    pytest.mark.no_gpu("ranks meet in memory of the host"),
]

ORDER = (4, 8, 8, 4, 6, 4)
ROWS = (4, 6, 8)


class Net(nn.Module):
    """Two layers, split over the axis model, each on a stage of its own where there are two."""

    def __init__(self):
        self.up = nn.Linear(8, 16, sbp={"model": af.split(0)})
        self.down = nn.Linear(16, 5, sbp={"model": af.split(1)})

    def __call__(self, x):
        with af.stage(0):
            h = af.relu(self.up(x))
        with af.stage(1):
            return self.down(h)


def make_job(mesh=None, **options):
    @af.job(optimizer=af.optim.AdamW(1e-2), mesh=mesh, **options)
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


def batch(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 5, rows).astype(np.int32)}


def source(order=ORDER):
    types = {rows: batch(rows, 0) for rows in ROWS}
    return from_iterable(
        lambda: iter([batch(rows, number) for number, rows in enumerate(order)]),
        [af.data.spec_of(one) for one in types.values()],
    )


@pytest.fixture(scope="module")
def alone():
    """Losses and parameters of one rank."""
    model, losses, job = Net(), [], make_job()
    for number, rows in enumerate(ORDER):
        losses.append(job.step(model, batch(rows, number))["loss"])
    job.close(model)
    return losses, model.state()


def assert_close(came, expected):
    losses, state = came
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    for name, array in expected[1].items():
        np.testing.assert_allclose(state[name], array, rtol=1e-4, atol=1e-6)


WAYS = [("data", {}), ("model", {}), ("stage", {}), ("data", {"zero": True})]


@pytest.mark.parametrize(("axis", "options"), WAYS, ids=["data", "model", "stage", "zero"])
@pytest.mark.parametrize("call", ["step", "fit", "stream"])
def test_ranks_that_switch_together_train_as_one_does(
    axis, options, call, alone, monkeypatch, tmp_path
):
    def script(rank):
        job, model, losses = (
            make_job(af.Mesh(**{"data": 1, "model": 1, axis: 2}), **options),
            Net(),
            [],
        )
        if call == "fit":
            call_options = {"steps": len(ORDER), "progress": False, "checkpoint": tmp_path / "run"}
            heard = lambda step, metrics: losses.append(metrics["loss"])  # noqa: E731  # short
            job.fit(model, source(), every=2, on_step=heard, **call_options)
        elif call == "stream":
            losses = [metrics["loss"] for metrics in job.stream(model, source())]
        else:
            losses = [job.step(model, batch(r, n))["loss"] for n, r in enumerate(ORDER)]
            job.close(model)
        return losses, model.state()

    with launched(monkeypatch):
        for came in on_ranks(2, script):
            assert_close(came, alone)
    if call == "fit":
        model = Net()
        options = {"steps": len(ORDER), "progress": False, "checkpoint": tmp_path / "run"}
        assert make_job().fit(model, source(), **options).first_step == len(ORDER)
        assert_close((alone[0], model.state()), alone)


def test_a_run_on_two_ranks_resumes_at_a_switch(alone, monkeypatch, tmp_path):
    def script(rank):
        losses = []
        for steps in (3, len(ORDER)):
            model = Net()
            make_job(af.Mesh(data=2, model=1)).fit(
                model,
                source(),
                steps=steps,
                progress=False,
                checkpoint=tmp_path / "run",
                on_step=lambda step, metrics: losses.append(metrics["loss"]),
            )
        return losses, model.state()

    with launched(monkeypatch):
        (came, *_) = on_ranks(2, script)
    assert_close(came, alone)


def test_ranks_with_batches_of_other_shapes_are_named(monkeypatch):
    def script(rank):
        order = (4, 8, 4) if rank == 0 else (4, 6, 4)
        make_job(af.Mesh(data=2, model=1)).fit(Net(), source(order), steps=3, progress=False)

    with launched(monkeypatch):
        errors = on_ranks(2, script)
    assert "rank 1 has a batch of other types for step 2 than rank 0" in str(errors[0])


def test_a_rank_that_asks_for_the_end_ends_all_at_one_step(monkeypatch):
    def script(rank):
        def on_step(step, metrics):
            if rank == 1 and step == 2:
                raise af.StopTraining("enough")

        job = make_job(af.Mesh(data=2, model=1))
        return job.fit(Net(), source(), steps=6, progress=False, on_step=on_step).last_step

    with launched(monkeypatch):
        assert on_ranks(2, script) == [2, 2]


def test_a_source_without_a_batch_is_an_error_on_all_ranks(monkeypatch):
    def script(rank):
        with pytest.raises(af.DataError, match=r"test_rank_shapes\.py:[0-9]+: the data source"):
            make_job(af.Mesh(data=2, model=1)).fit(Net(), source(()), steps=2, progress=False)
        return rank

    with launched(monkeypatch):
        assert on_ranks(2, script) == [0, 1]


MESH = af.Mesh(data=2, model=1)


def num_files():
    """Return how many files this process has open, but for those that another rank looks at."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return len([link for link in links if not link.startswith("/proc/")])


def test_switches_ask_no_other_rank_and_open_nothing(monkeypatch):
    def num_maps():
        return Path("/proc/self/maps").read_text().count("memfd:actorflow registers")

    gc.collect()  # what other tests have left would go meanwhile
    gathers, others = [], num_maps()
    meet = threading.Barrier(2, timeout=60)  # or one rank counts while the other one steps

    def script(rank):
        job, model, held = make_job(MESH, memory_budget="1MiB"), Net(), []
        for _ in range(4):
            for rows in (8, *ROWS):
                job.step(model, batch(rows, rows))
            meet.wait()
            held.append((threading.active_count(), num_files(), len(gathers), num_maps() - others))
            meet.wait()
        job.close(model)
        return held

    with launched(monkeypatch):
        for held in on_ranks(2, script, gathers=gathers):
            assert held[1] == held[2], held
            assert held[2][-1] == 4, "two ranks of this process map one memory of each other"


@pytest.mark.parametrize("axis", ["data", "stage"])
@pytest.mark.parametrize("most", [1, 2])
def test_of_more_plans_than_stay_open_all_ranks_close_the_same(axis, most, alone, monkeypatch):
    def script(rank):
        mesh = af.Mesh(**{"data": 1, "model": 1, axis: 2})
        job, model, losses = make_job(mesh, max_plans=most), Net(), []
        for number, rows in enumerate(ORDER):
            losses.append(job.step(model, batch(rows, number))["loss"])
        job.close(model)
        return losses, model.state()

    with launched(monkeypatch):
        for came in on_ranks(2, script):
            assert_close(came, alone)


@pytest.mark.parametrize("axis", ["data", "model", "stage"])
def test_what_is_written_between_shapes_counts_from_the_next_step_on(axis, monkeypatch):
    def script(rank, mesh=None):
        job, model, seen = make_job(mesh), Net(), []
        for number, rows in enumerate(ORDER):
            seen.append(job.step(model, batch(rows, number))["loss"])
            model.load({name: array * 0.9 for name, array in model.state().items()})
        job.close(model)
        return seen, model.state()

    expected = script(0)
    mesh = af.Mesh(**{"data": 1, "model": 1, axis: 2})
    with launched(monkeypatch):
        for came in on_ranks(2, lambda rank: script(rank, mesh)):
            assert_close(came, expected)


def test_what_one_rank_writes_before_a_switch_is_refused(monkeypatch):
    def script(rank):
        job, model = make_job(MESH), Net()
        for number, rows in enumerate((4, 8, 4)):
            job.step(model, batch(rows, number))
        if rank:
            model.load({name: array * 0.9 for name, array in model.state().items()})
        for _ in range(3):
            job.step(model, batch(8, 3))

    with launched(monkeypatch):
        errors = on_ranks(2, script)
    assert "rank 1 wrote to the variables of the job before step 4" in str(errors[0])
    assert "which rank 0 did not" in str(errors[1])


@pytest.mark.parametrize("known", [(4, 8), (4,)], ids=["open on both", "new to one"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_step_of_ranks_on_batches_of_other_types_names_both(known, first, monkeypatch):
    def script(rank):
        job, model = make_job(MESH), Net()
        for rows in (*known, 4):
            job.step(model, batch(rows, rows))
        job.step(model, batch(8 if rank == first else 4, 0))

    with launched(monkeypatch):
        errors = on_ranks(2, script, wait_s=30.0)
    types = [f"x float32[{rows}, 8], y int32[{rows}]" for rows in (4, 8)]
    said = f"{types[first]}, and {types[1 - first]}; give all ranks the same batches"
    for error in errors:
        assert f"rank 1 was given a batch of other types for step {len(known) + 2}" in str(error)
        assert said in str(error)


@pytest.mark.parametrize("mesh", [MESH, None], ids=["together", "each by itself"])
def test_ranks_evaluate_between_steps_of_several_shapes(mesh, monkeypatch):
    def script(rank, mesh, evaluation_mesh):
        @af.job(train=False, mesh=evaluation_mesh)
        def evaluate(model, batch):
            return {"loss": af.cross_entropy(model(batch.x), batch.y)}

        watched = af.Evaluation(evaluate, source((4, 8, 6)), every=2, batches=3)
        options = {"steps": len(ORDER), "progress": False, "evaluation": watched}
        return make_job(mesh).fit(Net(), source(), **options).evaluations

    expected = script(0, None, None)
    assert [step for step, _ in expected] == [2, 4, 6]
    with launched(monkeypatch):
        for came in on_ranks(2, lambda rank: script(rank, MESH, mesh)):
            assert [step for step, _ in came] == [2, 4, 6]
            for (_, means), (_, told) in zip(expected, came, strict=True):
                assert told == pytest.approx(means, rel=1e-5)


def test_a_rank_that_fails_between_shapes_ends_the_others_with_its_error(monkeypatch):
    def script(rank):
        def on_step(step, metrics):
            if rank == 1 and step == 3:
                raise KeyError("no more")

        make_job(MESH).fit(Net(), source(), steps=6, progress=False, on_step=on_step)

    with launched(monkeypatch):
        errors = on_ranks(2, script, wait_s=30.0)
    assert isinstance(errors[1], KeyError)
    assert "rank 1 failed: KeyError: 'no more'" in str(errors[0])


@pytest.mark.parametrize("rows", [8, 6], ids=["open", "new"])
def test_a_rank_that_switches_when_another_has_failed_raises_what_that_raised(rows, monkeypatch):
    def script(rank):
        job, model = make_job(MESH), Net()
        for number in (8, 4):
            job.step(model, batch(number, number))
        if rank == 1:
            raise KeyError("no more")
        job.step(model, batch(rows, 0))

    with launched(monkeypatch):
        errors = on_ranks(2, script, wait_s=30.0)
    assert "rank 1 failed: KeyError: 'no more'" in str(errors[0])


@pytest.mark.usefixtures("cached_toolchain")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("most", [8, 1])
@pytest.mark.parametrize("axis", ["data", "stage"])
def test_ranks_on_gpus_take_turns_as_those_of_the_host_do(axis, most, alone, monkeypatch):
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    mesh = af.Mesh(**{"data": 1, "model": 1, axis: 2})

    def script(rank):
        job, model, losses = make_job(mesh, device="cuda", max_plans=most), Net(), []
        for number, rows in enumerate(ORDER):
            losses.append(job.step(model, batch(rows, number))["loss"])
        job.close(model)
        return losses, model.state()

    with launched(monkeypatch):
        for came in on_ranks(2, script):
            assert_close(came, alone)
