"""Paddings that fit no tensor, and a layer of the user's own that is a convolution."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn


def out(layer, x):
    return af.job(train=False)(lambda model, batch: model(batch.x)).step(layer, {"x": x})["output"]


def test_one_width_is_that_of_all_sides():
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.testing.assert_array_equal(
        out(nn.ReplicationPad2d(2), x), np.pad(x, ((0, 0), (2, 2), (2, 2)), mode="edge")
    )
    assert nn.ZeroPad3d(1).padding == nn.CircularPad3d((1,) * 6).padding == (1,) * 6


def test_constants_go_around_tensors_of_any_axes_and_integers():
    x = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.testing.assert_array_equal(out(nn.ConstantPad2d(1, 7), x), np.pad(x, 1, constant_values=7))


@pytest.mark.parametrize(
    "function",
    [
        lambda: nn.ReflectionPad2d((1, 2)),
        lambda: nn.ZeroPad1d("wide"),
        lambda: out(nn.CircularPad2d(1), np.ones((3, 3), np.float32)),
        lambda: out(nn.ReflectionPad1d(3), np.ones((1, 1, 3), np.float32)),
    ],
)
def test_a_padding_that_does_not_fit_is_refused(function):
    with raises(af.CompileError):
        function()


def test_a_users_own_convolution_has_the_axes_of_its_base():
    class Own(nn.Conv2d):
        pass

    assert Own(1, 1, 3).weight.shape == (1, 1, 3, 3)
