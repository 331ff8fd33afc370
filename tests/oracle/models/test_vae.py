"""The variational autoencoder against torch's example; what it draws is fed to both."""

import datasets
import numpy as np
from curves import Curve, adamw
from models.vae import VAE, elbo_loss
from oracle import seeded

PIXELS, HIDDEN, LATENT = 64, 32, 5


def torch_vae(torch):
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(PIXELS, HIDDEN)
            self.fc21, self.fc22 = nn.Linear(HIDDEN, LATENT), nn.Linear(HIDDEN, LATENT)
            self.fc3, self.fc4 = nn.Linear(LATENT, HIDDEN), nn.Linear(HIDDEN, PIXELS)

        def forward(self, x, noise):
            h = torch.relu(self.fc1(x))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + noise * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(torch.relu(self.fc3(z)))), mu, logvar

    return Net()


def torch_loss(torch, model, batch):
    recon, mu, logvar = model(batch["x"], batch["noise"])
    bce = torch.nn.functional.binary_cross_entropy(recon, batch["x"], reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return (bce + kld) / len(recon)


def batch(step):
    drawn = datasets.digits(16, size=8, seed=step % 4)
    noise = seeded("noise", step).standard_normal((16, LATENT)).astype(np.float32)
    return {"x": drawn["x"].reshape(16, PIXELS), "noise": noise}


CURVES = [
    Curve(
        "vae",
        lambda: VAE(PIXELS, HIDDEN, LATENT),
        torch_vae,
        lambda model, batch: elbo_loss(batch.x, *model(batch.x, batch.noise)),
        torch_loss,
        batch,
        adamw(3e-3),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
