"""LeNet-5, a small ResNet, VGG-16 or vision transformer learns to read digits, or Fashion-MNIST.

python examples/digits.py [--model resnet] [--data FOLDER] [--steps 600] [--png FILE]
"""

import argparse

import numpy as np
import picture
from datasets import load
from models.lenet import LeNet5
from models.resnet import resnet18
from models.vgg import vgg16_bn
from models.vit import VisionTransformer

import actorflow as af

MODELS = {
    "lenet": LeNet5,
    "resnet": lambda: resnet18(10, channels=1, width=8, stem="cifar"),
    "vgg": lambda: vgg16_bn(10, channels=1, width=8, hidden=128, pooled=1, dropout=0.2),
    "vit": lambda: VisionTransformer(10, size=28, patch=7, channels=1, dim=96, depth=4, heads=4),
}
SIZES = {"vgg": 32}
"""Rows and columns that a model wants, where they are not 28."""


def make_job(rate, steps):
    schedule = af.optim.one_cycle(rate, steps=steps)

    @af.job(optimizer=af.optim.AdamW(schedule, weight_decay=0.05, decay_only="matrices"))
    def train(model, batch):
        return af.cross_entropy(model(batch.x), batch.y)

    return train


@af.job(train=False)
def read(model, batch):
    return model(batch.x).argmax(1)


def accuracy(model, unseen, batch):
    """Return the part of pictures that are read rightly; read some at a time."""
    right = 0
    for begin in range(0, len(unseen["y"]), batch):
        x, y = (unseen[name][begin : begin + batch] for name in "xy")
        right += np.sum(read.step(model, {"x": x})["output"] == y)
    read.close(model)
    return right / len(unseen["y"])


def main():
    parser = argparse.ArgumentParser(description="Train a model and tell how well it reads.")
    parser.add_argument("--model", choices=MODELS, default="lenet")
    parser.add_argument("--data", help="a folder of Fashion-MNIST's files; default: drawn digits")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
    parser.add_argument("--png", default="runs/digits.png", help="where the picture is written")
    args = parser.parse_args()

    num = min(10_000, args.steps * args.batch)
    known, unseen = load(args.data, num=num, size=SIZES.get(args.model, 28))
    model, losses = MODELS[args.model](), []
    data = af.data.ArraySource(known, batch=args.batch)
    make_job(args.rate, args.steps).fit(
        model, data, steps=args.steps, on_step=lambda step, out: losses.append(out["loss"])
    )

    found = accuracy(model, unseen, batch=200)
    print(f"accuracy of {args.model} on {len(unseen['y'])} unseen pictures: {found:.2%}")
    picture.write_png(args.png, picture.curves({"loss": losses}), picture.grid(unseen["x"][:32]))
    print(f"the loss by step, and some pictures: {args.png}")


if __name__ == "__main__":
    main()
