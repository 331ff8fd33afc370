"""A variational autoencoder (Kingma & Welling, 2013) of 28 x 28 pictures, by torch's example."""

import actorflow as af
from actorflow import nn


class VAE(nn.Module):
    """x [N, pixels] -> (logits of pixels, mean and log variance of what they are made of)."""

    def __init__(self, pixels=784, hidden=400, latent=20):
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h = af.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def decode(self, z):
        return self.fc4(af.relu(self.fc3(z)))

    def __call__(self, x, noise=None):
        mean, log_var = self.encode(x)
        noise = af.randn_like(mean) if noise is None else noise
        return self.decode(mean + af.exp(0.5 * log_var) * noise), mean, log_var


def elbo_loss(x, logits, mean, log_var):
    """Return nats per picture: what the pixels cost, and the divergence from N(0, 1)."""
    pixels = af.binary_cross_entropy_with_logits(logits, x, reduction="sum")
    divergence = -0.5 * (1.0 + log_var - mean * mean - af.exp(log_var)).sum()
    return (pixels + divergence) / len(x)
