"""DCGAN against torch's example: two losses, two optimizers, both stepped from the same values."""

import datasets
import numpy as np
from curves import Curve, Optimized
from models.dcgan import DCGAN
from oracle import seeded

import actorflow as af

LATENT, WIDTH, SIZE = 6, 4, 16


def torch_dcgan(torch):
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = nn.Module(), nn.Module()
            self.generator.main = nn.Sequential(
                nn.ConvTranspose2d(LATENT, 2 * WIDTH, 4, 1, 0, bias=False),
                nn.BatchNorm2d(2 * WIDTH),
                nn.ReLU(),
                nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False),
                nn.BatchNorm2d(WIDTH),
                nn.ReLU(),
                nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
                nn.Tanh(),
            )
            self.discriminator.main = nn.Sequential(
                nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
                nn.LeakyReLU(0.2),
                nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False),
                nn.BatchNorm2d(2 * WIDTH),
                nn.LeakyReLU(0.2),
                nn.Conv2d(2 * WIDTH, 1, 4, 1, 0, bias=False),
                nn.Sigmoid(),
            )

    return Net()


def torch_losses(torch, model, batch):
    entropy = torch.nn.functional.binary_cross_entropy
    fake = model.generator.main(batch["z"])
    right, wrong = (model.discriminator.main(x).flatten() for x in (batch["x"], fake))
    yes, no = torch.ones_like(right), torch.zeros_like(right)
    return {"d_loss": entropy(right, yes) + entropy(wrong, no), "g_loss": entropy(wrong, yes)}


def batch(step):
    x = 2.0 * datasets.digits(8, size=SIZE, seed=step % 4)["x"] - 1.0
    z = seeded("z", step).standard_normal((8, LATENT, 1, 1)).astype(np.float32)
    return {"x": x.astype(np.float32), "z": z}


def adam(player, key):
    return Optimized(
        af.optim.Adam(2e-3, betas=(0.5, 0.999)),
        lambda torch, params: torch.optim.Adam(params, 2e-3, betas=(0.5, 0.999)),
        f"{player}.*",
        key,
    )


CURVES = [
    Curve(
        "dcgan",
        lambda: DCGAN(size=SIZE, latent=LATENT, width=WIDTH, channels=1),
        torch_dcgan,
        lambda model, batch: model(batch.x, batch.z),
        torch_losses,
        batch,
        (adam("generator", "g_loss"), adam("discriminator", "d_loss")),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
