"""LeNet-5 learns to read digits, or Fashion-MNIST.

python examples/digits.py [--data FOLDER] [--steps 600] [--png FILE]
"""

import argparse

import numpy as np
import picture
from datasets import load
from models.lenet import LeNet5

import actorflow as af


@af.job(optimizer=af.optim.Adam(2e-3))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@af.job(train=False)
def read(model, batch):
    return model(batch.x).argmax(1)


def main():
    parser = argparse.ArgumentParser(description="Train LeNet-5 and tell how well it reads.")
    parser.add_argument("--data", help="a folder of Fashion-MNIST's files; default: drawn digits")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--png", default="runs/digits.png", help="where the picture is written")
    args = parser.parse_args()

    known, unseen = load(args.data, num=min(10_000, args.steps * args.batch))
    model, losses = LeNet5(), []
    data = af.data.ArraySource(known, batch=args.batch)
    train.fit(model, data, steps=args.steps, on_step=lambda step, out: losses.append(out["loss"]))

    answers = read.step(model, {"x": unseen["x"]})["output"]
    print(f"accuracy on {len(answers)} unseen pictures: {np.mean(answers == unseen['y']):.1%}")
    picture.write_png(args.png, picture.curves({"loss": losses}), picture.grid(unseen["x"][:32]))
    print(f"the loss by step, and some pictures: {args.png}")


if __name__ == "__main__":
    main()
