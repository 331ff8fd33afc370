"""Layers of convolutions: parameters as torch has them, and what a user reads of wrong ones."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError


def traced(function, **shapes):
    """Compile a job of one function of tensors."""
    job = af.job(train=False)(lambda model, batch: {"y": function(batch["x"], batch["w"])})
    model = nn.Module()
    try:
        feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return job.step(model, feeds)["y"]
    finally:
        job.close(model)


@pytest.mark.parametrize(
    ("layer", "weight", "fan_in"),
    [
        (nn.Conv1d(4, 6, 3), (6, 4, 3), 12),
        (nn.Conv2d(4, 6, (3, 5), groups=2), (6, 2, 3, 5), 30),
        (nn.Conv3d(4, 6, 1), (6, 4, 1, 1, 1), 4),
        (nn.ConvTranspose1d(4, 6, 3), (4, 6, 3), 18),
        (nn.ConvTranspose2d(4, 6, 2, groups=2), (4, 3, 2, 2), 12),
        (nn.ConvTranspose3d(4, 6, 1), (4, 6, 1, 1, 1), 6),
    ],
)
def test_parameters_begin_like_torchs(layer, weight, fan_in):
    assert {name: p.shape for name, p in layer.named_parameters()} == {
        "weight": weight,
        "bias": (6,),
    }
    bounds = [dict(p.init)["bound"] for _, p in layer.named_parameters()]
    assert bounds == pytest.approx([fan_in**-0.5] * 2)


WRONG = (
    lambda x, w: af.conv2d(x, w, padding="same", stride=2),
    lambda x, w: af.conv2d(x, w, padding="full"),
    lambda x, w: af.conv2d(x, w, stride=0),
    lambda x, w: af.conv2d(x, w, padding=(1, 2, 3)),
    lambda x, w: af.conv1d(x, w),
    lambda x, w: af.conv2d(x, w[0]),
    lambda x, w: af.conv2d(x, w, w[0, 0, 0]),
    lambda x, w: af.conv2d(x, w, dilation=9),
    lambda x, w: af.conv_transpose2d(x, w, output_padding=1),
    lambda x, w: af.max_pool2d(x, 10**30, ceil_mode=True),
    lambda x, w: af.max_pool2d(x, 3, padding=2),
    lambda x, w: af.avg_pool2d(x, 2, divisor_override=0),
    lambda x, w: af.adaptive_avg_pool2d(x, 0),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_with_the_users_line(wrong):
    with raises(CompileError):
        traced(lambda x, w: wrong(x, w), x=(2, 4, 8, 8), w=(6, 4, 3, 3))


def test_layers_of_groups_that_do_not_divide_say_so():
    with raises(CompileError):
        nn.Conv2d(4, 6, 3, groups=3)


def test_a_single_image_needs_no_batch():
    assert traced(lambda x, w: af.conv2d(x, w), x=(4, 8, 8), w=(6, 4, 3, 3)).shape == (6, 6, 6)
    pooled = traced(lambda x, w: nn.MaxPool2d(2)(x), x=(4, 8, 8), w=(1,))
    assert pooled.shape == (4, 4, 4)


@pytest.mark.parametrize("shape", [(2, 0, 4, 4), (0, 3, 4, 4), (0, 0, 4, 4)])
def test_means_of_windows_take_images_of_no_channels_and_batches_of_no_images(shape):
    assert traced(lambda x, w: af.avg_pool2d(x, 2), x=shape, w=(1,)).shape == (*shape[:2], 2, 2)


def test_means_of_windows_too_large_for_a_kernel_per_channel_are_right(monkeypatch):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    monkeypatch.setattr("actorflow.functional.pooling.MOST_IN_WINDOW", 20)
    job = af.job(train=False)(lambda model, batch: {"y": af.avg_pool2d(batch["x"], (5, 4))})
    found = job.step(nn.Module(), {"x": x})["y"]
    np.testing.assert_allclose(found, x.mean((2, 3), keepdims=True), 1e-5, 1e-6)
