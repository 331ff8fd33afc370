"""The models of examples/, stepped eagerly and by the plan without fusion: the same bits."""

import curves
import numpy as np
import pytest
from changed_passes import plan_without_fusion

pytestmark = pytest.mark.host("eager mode computes on the host")

CURVES = {curve.name: curve for curve in curves.all_curves()}


def stepped(curve, is_eager):
    """Return the outputs of two steps, and the model after them."""
    job, model = curves.job_of(curve), curves.begun(curve)
    call = job.eager_step if is_eager else job.step
    outputs = [call(model, curve.batch(number)) for number in range(2)]
    return outputs, model.state()


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", CURVES)
def test_a_model_has_the_bits_of_the_plan_without_fusion(name, monkeypatch):
    plan_without_fusion(monkeypatch)
    eager, planned = [stepped(CURVES[name], is_eager) for is_eager in (True, False)]
    for one, other in zip(eager[0], planned[0], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], key)
    for path in eager[1]:
        np.testing.assert_array_equal(eager[1][path], planned[1][path], path)
