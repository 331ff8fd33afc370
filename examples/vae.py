"""A variational autoencoder learns digits, or Fashion-MNIST, and dreams up new ones.

python examples/vae.py [--data FOLDER] [--steps 1500] [--png FILE]
"""

import argparse

import picture
from datasets import load
from models.vae import VAE, elbo_loss

import actorflow as af


@af.job(optimizer=af.optim.Adam(1e-3))
def train(model, batch):
    x = batch.x.flatten(1)
    return elbo_loss(x, *model(x))


@af.job(train=False)
def judge(model, batch):
    x = batch.x.flatten(1)
    logits, mean, log_var = model(x)
    return {"loss": elbo_loss(x, logits, mean, log_var), "again": af.sigmoid(logits)}


@af.job(train=False)
def dream(model, batch):
    return af.sigmoid(model.decode(af.randn(64, 20)))


def main():
    parser = argparse.ArgumentParser(description="Train a variational autoencoder.")
    parser.add_argument("--data", help="a folder of Fashion-MNIST's files; default: drawn digits")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--png", default="runs/vae.png", help="where the picture is written")
    args = parser.parse_args()

    known, unseen = load(args.data, num=min(10_000, args.steps * args.batch), noise=0.0)
    model, losses = VAE(), []
    data = af.data.ArraySource(known, batch=args.batch)
    train.fit(model, data, steps=args.steps, on_step=lambda step, out: losses.append(out["loss"]))

    x = unseen["x"][:1000]
    judged = judge.step(model, {"x": x})
    print(f"bound on {len(x)} unseen pictures: {judged['loss']:.1f} nats")
    dreams = dream.step(model, {})["output"]
    picture.write_png(
        args.png,
        picture.curves({"loss": losses}),
        picture.grid(x[:8]),
        picture.grid(judged["again"][:8].reshape(-1, 28, 28)),
        picture.grid(dreams.reshape(-1, 28, 28)),
    )
    print(f"the loss by step, pictures, the same through the model, and new ones: {args.png}")


if __name__ == "__main__":
    main()
