"""A DCGAN learns to draw digits, or clothes of Fashion-MNIST: two players, an optimizer for each.

python examples/dcgan.py [--data FOLDER] [--steps 400] [--png FILE]
"""

import argparse

import numpy as np
import picture
from datasets import load
from models.dcgan import DCGAN

import actorflow as af

LATENT = 32


@af.job(
    optimizer=[
        af.optim.on("generator.*", af.optim.Adam(1e-3, betas=(0.5, 0.999)), loss="g_loss"),
        af.optim.on("discriminator.*", af.optim.Adam(4e-4, betas=(0.5, 0.999)), loss="d_loss"),
    ]
)
def play(model, batch):
    return model(2.0 * batch.x - 1.0)


@af.job(train=False)
def draw(model, batch):
    return 0.5 * (model.generator(batch.z) + 1.0)


def main():
    parser = argparse.ArgumentParser(description="Train a DCGAN and let it draw.")
    parser.add_argument("--data", help="a folder of Fashion-MNIST's files; default: drawn digits")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--png", default="runs/dcgan.png", help="where the picture is written")
    args = parser.parse_args()

    known, _ = load(args.data, num=min(10_000, args.steps * args.batch), size=32, noise=0.0)
    model = DCGAN(size=32, latent=LATENT, width=16, channels=1)
    losses = {"g_loss": [], "d_loss": []}

    def remember(step, out):
        for name, line in losses.items():
            line.append(out[name])

    data = af.data.ArraySource(known, batch=args.batch)
    play.fit(model, data, steps=args.steps, on_step=remember)

    z = np.random.default_rng(0).standard_normal((64, LATENT, 1, 1)).astype(np.float32)
    drawn = draw.step(model, {"z": z})["output"]
    ink, real = np.mean(drawn), np.mean(known["x"])
    print(f"mean brightness of {len(drawn)} drawn pictures: {ink:.3f}; of real ones: {real:.3f}")
    picture.write_png(args.png, picture.curves(losses), picture.grid(drawn))
    print(f"losses of the generator and the discriminator, and what was drawn: {args.png}")


if __name__ == "__main__":
    main()
