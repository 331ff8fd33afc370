"""DLRM, or Wide & Deep, learns who clicks on what, from clicks that are made up here.

python examples/dlrm_clicks.py [--wide-deep] [--steps 3000]
"""

import argparse

import picture
from clicks import clicks, rank
from models.dlrm import DLRM
from models.wide_deep import WideDeep

import actorflow as af

ROWS = (2000, 1000, 500, 200, 100, 50, 20, 10)
UNSEEN = 10_000


def logit(model, batch):
    """Return the logits of clicks; Wide & Deep has one for no click, too."""
    found = model(batch.dense, batch.ids)
    return found if found.ndim == 1 else found[:, 1] - found[:, 0]


@af.job(optimizer=af.optim.Adagrad(2e-2))
def train(model, batch):
    return af.binary_cross_entropy_with_logits(logit(model, batch), batch.y)


@af.job(train=False)
def predict(model, batch):
    return {"logit": logit(model, batch)}


def main():
    parser = argparse.ArgumentParser(description="Train a model of who clicks.")
    parser.add_argument("--wide-deep", action="store_true", help="Wide & Deep in place of DLRM")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rows", type=int, default=300_000, help="clicks to learn from")
    parser.add_argument(
        "--png", default="runs/dlrm_clicks.png", help="where the picture is written"
    )
    args = parser.parse_args()

    arrays, logits = clicks(args.rows + UNSEEN, ROWS)
    known = {name: array[UNSEEN:] for name, array in arrays.items()}
    unseen = {name: array[:UNSEEN] for name, array in arrays.items()}
    model, losses = WideDeep(ROWS) if args.wide_deep else DLRM(ROWS), []
    data = af.data.ArraySource(known, batch=256)
    train.fit(model, data, steps=args.steps, on_step=lambda _, out: losses.append(out["loss"]))

    found = predict.step(model, {name: unseen[name] for name in ("dense", "ids")})["logit"]
    own, best = rank(found, unseen["y"]), rank(logits[:UNSEEN], unseen["y"])
    print(f"unseen clicks: an area under the curve of {own:.3f}, where {best:.3f} is the best")
    picture.write_png(args.png, picture.curves({"loss": losses}))
    print(f"the loss by step: {args.png}")


if __name__ == "__main__":
    main()
