"""A step that fails on a bad id or label takes nothing of the training with it."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

pytestmark = pytest.mark.host("a launch that fails on a device takes the memory along")


class Table(nn.Module):
    def __init__(self):
        self.rows, self.down = nn.Embedding(10, 8), nn.Linear(8, 5)


def loss_of(model, batch):
    return af.cross_entropy(model.down(model.rows(batch.ids)), batch.y)


def batch_of(seed, **changes):
    rng = np.random.default_rng(seed)
    ids, y = rng.integers(0, 10, 6), rng.integers(0, 5, 6)
    return {"ids": ids.astype(np.int32), "y": y.astype(np.int32), **changes}


BAD = [
    {"ids": np.array([1, 2, 3, 10, 4, 5], np.int32)},
    {"y": np.array([0, 1, 2, 3, 4, 5], np.int32)},
]


@pytest.mark.parametrize("bad", BAD, ids=["id", "label"])
@pytest.mark.parametrize("options", [{}, {"streams": 2}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [af.optim.SGD(0.1), af.optim.SGD(0.1, momentum=0.9), af.optim.AdamW(1e-2)],
    ids=["sgd", "momentum", "adamw"],
)
@pytest.mark.parametrize("kernels", ["native", "numpys_kernels"])
def test_a_failed_step_leaves_the_state_of_the_step_before_it(
    kernels, optimizer, options, bad, request
):
    request.getfixturevalue(kernels)
    each = options.get("accumulate", 1)
    straight, failing = [
        (af.job(loss_of, optimizer=optimizer, **options), Table()) for _ in range(2)
    ]
    for job, model in (straight, failing):
        for step in range(3):
            job.step(model, [batch_of(each * step + i) for i in range(each)])
    job, model = failing
    good = [batch_of(50 + i) for i in range(each - 1)]
    with pytest.raises(af.ActorFailed):
        job.step(model, [*good, batch_of(60, **bad)])
    expected = straight[1].state()
    for name, array in failing[1].state().items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    losses = [
        job.step(model, [batch_of(90 + i) for i in range(each)])
        for job, model in (straight, failing)
    ]
    assert losses[0] == losses[1]
    expected = straight[1].state()
    for name, array in failing[1].state().items():  # moments and counters went on too
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_where_nobody_knows_which_launch_failed_the_variables_go_back_to_those_before_the_run(
    monkeypatch, caplog
):
    """As on a device that runs a chain as a whole: an update may have been made, or not."""
    monkeypatch.setattr("actors.loop.worker.launch_number", lambda *_: None)
    job, model = af.job(loss_of, optimizer=af.optim.SGD(0.1)), Table()
    job.step(model, batch_of(1))
    job.close(model)
    before = {name: array.copy() for name, array in model.state().items()}
    job.step(model, batch_of(2))
    with raises(af.ActorFailed):
        job.step(model, batch_of(3, **BAD[0]))
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert "the variables return to their values before the run" in caplog.text
