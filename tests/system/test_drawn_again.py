"""Random numbers of every kind are the same after a resume, and where the forward runs again."""

import numpy as np
import pytest
from jobs import assert_same, losses_of_fit

import actorflow as af
from actorflow import nn
from compiler.contract.types import Phase

STEPS, WIDTH = 3, 24
GPU = {"device": "cuda", "gpu": "h200"}


class Noisy(nn.Module):
    """Blocks that draw: each kind of number is needed by the gradient, some by their indices."""

    def __init__(self):
        self.table = nn.Embedding(9, WIDTH)
        self.layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.drop = nn.Dropout(0.3)

    def __call__(self, batch):
        h = batch.x
        rows = h.shape[0]
        draws = [
            lambda h: h * (1.0 + 0.1 * af.randn(*h.shape)) + af.rand_like(h),
            lambda h: h * af.bernoulli(af.sigmoid(h)) + self.table(af.randint(0, 9, rows)),
            lambda h: (
                h[af.randperm(rows)] * af.normal(1.0, 0.2, (rows, 1), dtype="float64").to(h.dtype)
            ),
            lambda h: h + self.table(af.softmax(h[:, :9], 1).multinomial(1)).reshape(h.shape),
        ]
        for layer, draw in zip(self.layers, draws, strict=True):
            h = h + self.drop(af.tanh(layer(draw(h))))
        return af.square(h).mean()


def source():
    rng = np.random.default_rng(5)
    return af.data.ArraySource({"x": rng.standard_normal((96, WIDTH)).astype(np.float32)}, batch=32)


def make_job(**options):
    @af.job(**{"optimizer": af.optim.AdamW(1e-2), **options})
    def train(model, batch):
        return model(batch)

    return train


@pytest.fixture
def device(request, monkeypatch):
    """Return the options of a job on a host with or without a compiler, or on an emulated GPU."""
    if request.param == "native":
        request.getfixturevalue("native")
    monkeypatch.setenv("ACTORFLOW_CUDA", "emulated")
    return GPU if request.param == "cuda" else {}


def trained(job, steps=STEPS, **options):
    model = Noisy()
    return losses_of_fit(job, model, source(), steps, **options), model.state()


def num_again(plan):
    return sum([x.phase is Phase.RECOMPUTE for a in plan.actors for x in a.launches])


def in_parts(job, folder):
    """Return what `trained` does, of a run that ends after a step and is taken up again."""
    losses, _ = trained(job(), 1, checkpoint=folder, every=1)
    more, state = trained(job(), STEPS, checkpoint=folder, every=1)
    return losses + more, state


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_in_parts_draws_what_one_in_whole_does(accumulate, tmp_path):
    def job():
        return make_job(accumulate=accumulate)

    whole, expected = trained(job())
    losses, state = in_parts(job, tmp_path)
    assert losses == whole
    assert_same(state, expected)


@pytest.mark.parametrize("device", ["numpy", "native", "cuda"], indirect=True)
def test_what_runs_again_draws_what_it_drew_after_a_resume_too(device, tmp_path):
    whole, expected = trained(make_job(**device))

    def job():
        return make_job(recompute="blocks", **device)

    assert num_again(job().compile(Noisy(), source())) > 0
    losses, state = in_parts(job, tmp_path)
    assert losses == whole
    assert_same(state, expected)


@pytest.mark.one_device("sets budgets in bytes of one arena")
def test_within_the_smallest_budget_the_same_is_drawn():
    with pytest.raises(af.BudgetError) as caught:
        make_job(memory_budget=1).compile(Noisy(), source())
    job = make_job(memory_budget=caught.value.smallest_bytes)
    assert num_again(job.compile(Noisy(), source())) > 0
    losses, state = trained(job)
    whole, expected = trained(make_job())
    assert losses == whole
    assert_same(state, expected)


def test_a_seed_decides_what_is_drawn():
    one, _ = trained(make_job(seed=1), 2)
    again, _ = trained(make_job(seed=1), 2)
    other, _ = trained(make_job(seed=2), 2)
    assert one == again
    assert not {*one} & {*other}
