"""Rows that a buffer is assigned go where it lies, and change nothing of what a job computes."""

import numpy as np
import pytest

import actorflow as af
from actorflow import nn
from actorflow.data import spec_of

PLACES = [np.array([0, 2]), np.array([3, 2]), np.array([1, 1])]


class Cache(nn.Module):
    """`uses` says what else a step does with the rows that the buffer had before."""

    def __init__(self, uses="nothing"):
        self.rows = nn.Buffer((2, 4, 3))
        self.uses = uses

    def __call__(self, batch):
        before = self.rows * 1.0 if self.uses == "reads" else None
        new = af.index_put(self.rows, (np.arange(2), batch.place), batch.row)
        if self.uses == "puts twice":
            new = af.index_put(new, (np.arange(2), 0), batch.row * 2.0)
        self.rows.assign(new)
        y = {"sum": new.sum((1, 2))}
        return y if before is None else y | {"change": new - before}


def job_of():
    @af.job(train=False)
    def job(model, batch):
        return model(batch)

    return job


def batches():
    rng = np.random.default_rng(0)
    return [{"place": p, "row": rng.standard_normal((2, 3)).astype(np.float32)} for p in PLACES]


def ops_of(model):
    plan = job_of().compile(model, spec_of(batches()[0], "a test"))
    return {launch.op for actor in plan.actors for launch in actor.launches}


@pytest.mark.parametrize("uses", ["nothing", "reads", "puts twice"])
def test_a_buffer_has_the_rows_that_it_was_assigned_and_no_others(uses):
    model, job, expected = Cache(uses), job_of(), np.zeros((2, 4, 3), np.float32)
    for batch in batches():
        before = expected.copy()
        expected[[0, 1], batch["place"]] = batch["row"]
        if uses == "puts twice":
            expected[:, 0] = 2 * batch["row"]
        y = job.step(model, batch)
        np.testing.assert_allclose(y["sum"], expected.sum((1, 2)), rtol=1e-5)
        if uses == "reads":
            np.testing.assert_array_equal(y["change"], expected - before)
        np.testing.assert_array_equal(model.rows.data, expected)


@pytest.mark.parametrize("uses", ["nothing", "reads", "puts twice"])
def test_rows_go_to_the_buffer_at_once_where_nothing_else_reads_it(uses):
    """Else what the buffer had before would be gone when it is read."""
    ops = ops_of(Cache(uses))
    assert ("assign_rows" in ops) == (uses == "nothing")
    assert ("put_rows" in ops) == (uses != "nothing")


def test_a_job_that_trains_assigns_rows_and_gradients_flow_to_them():
    class Net(Cache):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(np.ones(3, np.float32))

        def __call__(self, batch):
            new = af.index_put(self.rows, (np.arange(2), batch.place), batch.row * self.scale)
            self.rows.assign(new)
            return (new * new).sum()

    @af.job(optimizer=af.optim.SGD(0.5))
    def train(model, batch):
        return model(batch)

    model, batch = Net(), batches()[0]
    train.step(model, batch)
    np.testing.assert_array_equal(model.rows.data[[0, 1], batch["place"]], batch["row"])
    np.testing.assert_allclose(model.scale.data, 1 - (batch["row"] ** 2).sum(0), rtol=1e-5)
