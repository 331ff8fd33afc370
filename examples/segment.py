"""A small U-Net learns what each pixel of a scene of digits is: ground, or which digit.

python examples/segment.py [--steps 300] [--png FILE]
"""

import argparse

import numpy as np
import picture
from datasets import scenes
from models.unet import UNet

import actorflow as af

CLASSES = 11


@af.job(optimizer=af.optim.Adam(1e-2))
def train(model, batch):
    return af.cross_entropy(model(batch.x), batch.y)


@af.job(train=False)
def segment(model, batch):
    return model(batch.x).argmax(1)


def main():
    parser = argparse.ArgumentParser(description="Train a U-Net on scenes of digits.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--png", default="runs/segment.png", help="where the picture is written")
    args = parser.parse_args()

    num = min(4000, args.steps * args.batch)
    known, unseen = scenes(num), scenes(min(100, num), seed=1)
    model, losses = UNet(CLASSES, width=8, depth=3), []
    data = af.data.ArraySource(known, batch=args.batch)
    train.fit(model, data, steps=args.steps, on_step=lambda step, out: losses.append(out["loss"]))

    answers, marks = segment.step(model, {"x": unseen["x"]})["output"], unseen["y"]
    overlaps = [
        np.sum((answers == c) & (marks == c)) / np.sum((answers == c) | (marks == c))
        for c in np.unique(marks)
    ]
    print(f"mean intersection over union of {len(overlaps)} classes: {np.mean(overlaps):.1%}")
    picture.write_png(
        args.png,
        picture.curves({"loss": losses}),
        picture.grid(unseen["x"][:8]),
        picture.grid(picture.classes(marks[:8], CLASSES)),
        picture.grid(picture.classes(answers[:8], CLASSES)),
    )
    print(f"the loss by step, scenes, what they are, and what was found: {args.png}")


if __name__ == "__main__":
    main()
