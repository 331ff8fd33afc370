"""What users of torch write first gets an answer that says what to write instead."""

import copy
import pickle

import numpy as np
import pytest

import actorflow as af
from actorflow import nn


def set_item(x):
    x[0] = 1.0
    return x


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (lambda x: x.sum().item(), AttributeError, "'item'; a tensor has data only while the plan"),
        (lambda x: x.numpy(), AttributeError, "return it from the job"),
        (lambda x: x.sum().backward(), AttributeError, "optimizer computes gradients itself"),
        (lambda x: x.requires_grad, AttributeError, r"af.grad\(y, x\)"),
        (lambda x: x.cuda(), AttributeError, r"@af.job\(device='cuda'\)"),
        (lambda x: x.add_(1), AttributeError, r"write x = x.add\(...\)"),
        (lambda x: x.never_heard_of, AttributeError, "'Tensor' object has no attribute"),
        (
            set_item,
            af.CompileError,
            r"test_habits.py:\d+: tensors never change; write x = af.index",
        ),
        (lambda x: [*x], af.CompileError, r"af.unbind\(x\) has its slices"),
        (lambda x: x if x.sum() > 0 else -x, af.CompileError, r"decide with tensors \(af.where\)"),
        (lambda x: x + np.ones(5, np.float32), af.CompileError, "axis -1 has extents 4 and 5"),
        (lambda x: x.to("int64").mean(), af.CompileError, r"cast it with .to\('float32'\)"),
        (lambda x: x.sum(dims=1), TypeError, "unexpected keyword argument 'dims'"),
    ],
)
def test_a_habit_from_torch_is_told_what_there_is_instead(traced, function, kind, words):
    with pytest.raises(kind, match=words):
        traced(function, x=(3, 4))


@pytest.mark.parametrize("name", ["no_grad", "manual_seed", "empty"])
def test_a_name_that_the_package_lacks_says_what_to_write(name):
    with pytest.raises(AttributeError, match=rf"{name}'; .*(write|say of the job)"):
        getattr(af, name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("parameters", r"named_parameters\(\)"),
        ("eval", r"@af.job\(train=False\)"),
        ("to", "device='cuda'"),
        ("state_dict", r"state\(\) returns"),
        ("register_buffer", "nn.Buffer"),
    ],
)
def test_a_module_says_what_stands_for_torchs_methods(name, words):
    model = nn.Linear(2, 2)
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=words):
        getattr(model, name)


def test_a_module_with_forward_is_told_of_call():
    class Torchs(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(af.CompileError, match=r"test_habits.py:\d+: Torchs has no __call__.*forwa"):
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
