"""What users of torch write first gets an answer that says what to write instead."""

import copy
import pickle

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn


def set_item(x):
    x[0] = 1.0
    return x


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.sum().item(), AttributeError),
        (lambda x: x.numpy(), AttributeError),
        (lambda x: x.sum().backward(), AttributeError),
        (lambda x: x.requires_grad, AttributeError),
        (lambda x: x.cuda(), AttributeError),
        (lambda x: x.add_(1), AttributeError),
        (lambda x: x.never_heard_of, AttributeError),
        (set_item, af.CompileError),
        (lambda x: [*x], af.CompileError),
        (lambda x: x if x.sum() > 0 else -x, af.CompileError),
        (lambda x: x + np.ones(5, np.float32), af.CompileError),
        (lambda x: x.to("int64").mean(), af.CompileError),
        (lambda x: x.sum(dims=1), TypeError),
    ],
)
def test_a_habit_from_torch_is_told_what_there_is_instead(traced, function, kind):
    with raises(kind):
        traced(function, x=(3, 4))


@pytest.mark.parametrize("name", ["no_grad", "manual_seed", "empty"])
def test_a_name_that_the_package_lacks_says_what_to_write(name):
    with raises(AttributeError):
        getattr(af, name)


@pytest.mark.parametrize("name", ["parameters", "eval", "to", "state_dict", "register_buffer"])
def test_a_module_says_what_stands_for_torchs_methods(name):
    model = nn.Linear(2, 2)
    assert not hasattr(model, name)
    with raises(AttributeError):
        getattr(model, name)


def test_a_module_with_forward_is_told_of_call():
    class Torchs(nn.Module):
        def forward(self, x):
            return x

    with raises(af.CompileError):
        Torchs()(1)


def test_modules_are_copied_and_pickled_as_ever():
    model = nn.Linear(2, 3)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model.weight))):
        assert "[3, 2]" in repr(getattr(other, "weight", other))


def test_what_torchs_tensors_do_without_changing_is_there(traced, evaluate):
    def function(x):
        assert (x.dim(), x.numel(), x.size(), x.size(-1)) == (2, 12, (3, 4), 4)
        made = x.contiguous().clone().add(1).mul(2).sub(x).div(2.0)
        made += 1
        return made.type_as(x)

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = evaluate(traced(function, x=(3, 4)), x=x)
    np.testing.assert_allclose(got, ((x + 1) * 2 - x) / 2 + 1)
