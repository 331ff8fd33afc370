"""Models have as many parameters as published, and begin with the published statistics."""

import pytest
from models.dcgan import DCGAN, Discriminator, Generator
from models.lenet import LeNet5
from models.resnet import resnet18, resnet50
from models.unet import UNet
from models.vae import VAE
from models.vgg import vgg16, vgg16_bn
from models.vit import vit_small_patch16_224

from actorflow.tensor.initial_values import initial_value


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (LeNet5, 61_706),
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (lambda: vgg16(channels=3), 138_357_544),
        (lambda: vgg16_bn(channels=3), 138_365_992),
        (lambda: UNet(2, channels=3), 31_037_698),
        (vit_small_patch16_224, 22_050_664),
        (VAE, 652_824),
        (Generator, 3_576_704),
        (Discriminator, 2_765_568),
    ],
)
def test_a_model_has_the_published_number_of_parameters(make, number):
    assert make().num_parameters() == number


def begins(model, name):
    """Return the mean and the deviation of what a parameter begins with."""
    parameter = dict(model.named_parameters())[name]
    value = initial_value(name, parameter.type, parameter.init, 0)
    return float(value.mean()), float(value.std())


@pytest.mark.parametrize(
    ("make", "name", "mean", "std"),
    [
        (LeNet5, "fc1.weight", 0.0, (1 / 3 / 400) ** 0.5),
        (resnet18, "layer2.0.conv2.weight", 0.0, (2 / (128 * 9)) ** 0.5),
        (resnet50, "conv1.weight", 0.0, (2 / (64 * 49)) ** 0.5),
        (lambda: resnet18(zero_init_residual=True), "layer1.0.bn2.weight", 0.0, 0.0),
        (lambda: resnet50(zero_init_residual=True), "layer1.0.bn3.weight", 0.0, 0.0),
        (lambda: resnet50(zero_init_residual=True), "layer1.0.bn2.weight", 1.0, 0.0),
        (vgg16, "features.14.weight", 0.0, (2 / (256 * 9)) ** 0.5),
        (vgg16, "classifier.6.weight", 0.0, 0.01),
        (vit_small_patch16_224, "blocks.3.attn.qkv.weight", 0.0, 0.02),
        (vit_small_patch16_224, "pos_embed", 0.0, 0.02),
        (vit_small_patch16_224, "head.bias", 0.0, 0.0),
        (DCGAN, "generator.main.3.weight", 0.0, 0.02),
        (DCGAN, "discriminator.main.6.weight", 1.0, 0.02),
    ],
)
def test_a_parameter_begins_with_the_published_statistics(make, name, mean, std):
    found = begins(make(), name)
    assert found[0] == pytest.approx(mean, abs=max(0.1 * std, 1e-7))
    assert found[1] == pytest.approx(std, rel=0.1, abs=1e-7)
