"""DCGAN (Radford et al., 2015) with the names of torch's example, for pictures of 2^k pixels."""

import actorflow as af
from actorflow import nn


def _stages(size):
    """Return how often 4 pixels are doubled to give `size`."""
    count = (size // 4).bit_length() - 1
    if size != 4 << count or count < 1:
        raise ValueError(f"a picture has 8, 16, 32, 64, ... pixels a side, got {size}")
    return count


class Generator(nn.Module):
    """z [N, latent, 1, 1] -> pictures [N, channels, size, size] in -1..1."""

    def __init__(self, *, size=64, latent=100, width=64, channels=3):
        count = _stages(size)
        planes = [width << level for level in reversed(range(count))]
        layers = [nn.ConvTranspose2d(latent, planes[0], 4, 1, 0, bias=False)]
        for a, b in zip(planes, [*planes[1:], None], strict=True):
            layers += [nn.BatchNorm2d(a), nn.ReLU()]
            layers.append(nn.ConvTranspose2d(a, b or channels, 4, 2, 1, bias=False))
        self.main = nn.Sequential(*layers, nn.Tanh())
        start(self)

    def __call__(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    """Pictures [N, channels, size, size] -> logits that they are real [N]."""

    def __init__(self, *, size=64, width=64, channels=3):
        layers = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for _ in range(_stages(size) - 1):
            layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False)]
            width *= 2
            layers += [nn.BatchNorm2d(width), nn.LeakyReLU(0.2)]
        layers.append(nn.Conv2d(width, 1, 4, 1, 0, bias=False))
        self.main = nn.Sequential(*layers)
        start(self)

    def __call__(self, x):
        return self.main(x).flatten()


class DCGAN(nn.Module):
    """Both players; the losses are those of one step of the game, with latent z from N(0, 1)."""

    def __init__(self, *, size=64, latent=100, width=64, channels=3):
        self.latent = latent
        self.generator = Generator(size=size, latent=latent, width=width, channels=channels)
        self.discriminator = Discriminator(size=size, width=width, channels=channels)

    def __call__(self, real, z=None):
        z = af.randn(len(real), self.latent, 1, 1) if z is None else z
        fake = self.generator(z)
        right, wrong = self.discriminator(real), self.discriminator(fake)
        found = _says(right, 1.0) + _says(wrong, 0.0)
        return {"d_loss": found, "g_loss": _says(wrong, 1.0)}


def start(module):
    """Let weights of convolutions begin as N(0, 0.02), and scales of norms as N(1, 0.02)."""
    for _, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, 0.0, 0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)


def _says(logits, answer):
    return af.binary_cross_entropy_with_logits(logits, af.full_like(logits, answer))
