"""What holds for every model of examples/models: budgets, resuming and accumulation keep its bits.

The models are those whose losses are held against torch's (tests/oracle/models), as small as there.
"""

from functools import cache

import curves
import numpy as np
import pytest
from jobs import assert_same

import actorflow as af

STEPS = 2
CURVES = {curve.name: curve for curve in curves.all_curves()}


class Batches:
    """The batches of a curve, each as often as is asked for."""

    def __init__(self, curve, times=1):
        self._curve, self._times, self._number = curve, times, 0

    def spec(self):
        return {
            name: af.TensorType(af.DType(str(array.dtype)), array.shape)
            for name, array in self._curve.batch(0).items()
        }

    def __next__(self):
        batch = self._curve.batch(self._number // self._times)
        self._number += 1
        return batch

    def state(self):
        return {"number": self._number}

    def restore(self, state):
        self._number = state["number"]

    def fingerprint(self):
        return self._curve.name


@cache
def job_of(name, **options):
    """Return a curve's job, which compiles a model of the same kind once."""
    return curves.job_of(CURVES[name], **options)


def fit(name, steps=STEPS, times=1, checkpoint=None, **options):
    """Return all that the model is after some steps."""
    model = curves.begun(CURVES[name])
    job_of(name, **options).fit(
        model,
        Batches(CURVES[name], times),
        steps=steps,
        checkpoint=checkpoint,
        every=1000,
        progress=False,
    )
    return model.state()


@cache
def freely(name):
    return fit(name)


@pytest.mark.one_device("sets budgets in bytes of one arena")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CURVES)
def test_a_model_within_a_budget_trains_to_the_same_bits(name):
    curve = CURVES[name]
    model, source = curves.begun(curve), Batches(curve)
    free = job_of(name).compile(model, source).arenas[0].size_bytes
    with pytest.raises(af.BudgetError) as caught:
        job_of(name, memory_budget=1).compile(model, source)
    least = caught.value.smallest_bytes
    budget = (least + free) // 2
    plan = job_of(name, memory_budget=budget).compile(model, source)
    assert plan.arenas[0].size_bytes <= budget
    if least < free:
        assert plan.recomputation[0].num_launches > 0
    assert_same(fit(name, memory_budget=budget), freely(name))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CURVES)
def test_a_model_that_is_resumed_has_the_bits_of_one_that_was_not(name, tmp_path):
    fit(name, steps=1, checkpoint=tmp_path)
    assert_same(fit(name, checkpoint=tmp_path), freely(name))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CURVES)
def test_a_step_of_the_same_batch_twice_is_a_step_of_that_batch(name):
    twice, once = fit(name, steps=1, times=2, accumulate=2), fit(name, steps=1)
    parameters = {n for n, _ in CURVES[name].model().named_parameters()}
    for path in parameters:
        np.testing.assert_array_equal(twice[path], once[path], err_msg=path)
