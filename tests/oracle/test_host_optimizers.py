"""What the host runs of optimizers, against torch's: L-BFGS, and rates that fall on a plateau."""

from dataclasses import dataclass, field

import numpy as np
from oracle import FEWEST, seeded

import actorflow as af
from actorflow import nn

STEPS = 2


def problem(number):
    """Return features, labels and first weights of a regression that is strictly convex."""
    rng = seeded("lbfgs", number)
    x, w = rng.normal(size=(12, 3)), rng.normal(size=3)
    return x, (rng.uniform(size=12) < 0.5).astype(np.float64), w


class Weights(nn.Module):
    def __init__(self, dtype):
        self.w = nn.Parameter((3,), dtype=dtype)


@af.job(train=False)
def evaluate(model, batch):
    z = (batch.x * model.w).sum(1)
    loss = (af.softplus(z) - batch.y * z).mean() + 0.05 * (model.w**2).sum()
    return {"loss": loss, **af.grad(loss, model)}


@dataclass(frozen=True)
class LbfgsCase:
    """Some steps of L-BFGS on several problems."""

    name: str
    settings: dict
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-5
    num_sets: int = FEWEST

    def ours(self, dtype):
        model, results = Weights(dtype), {}
        for number in range(self.num_sets):
            x, y, w = [array.astype(dtype) for array in problem(number)]
            model.load({"w": w})
            minimiser = af.optim.LBFGS(model, **self.settings)
            losses = [
                minimiser.step(lambda x=x, y=y: evaluate.step(model, {"x": x, "y": y}))
                for _ in range(STEPS)
            ]
            results |= {f"{number}.w": np.array(model.w.data), f"{number}.losses": np.array(losses)}
        evaluate.close(model)
        return results

    def torchs(self, torch):
        results = {}
        for number in range(self.num_sets):
            x, y, w = [torch.tensor(array) for array in problem(number)]
            w.requires_grad_()
            minimiser = torch.optim.LBFGS([w], **self.settings)

            def closure(x=x, y=y, w=w, minimiser=minimiser):
                minimiser.zero_grad()
                z = (x * w).sum(1)
                softplus = torch.nn.functional.softplus(z)
                loss = (softplus - y * z).mean() + 0.05 * (w**2).sum()
                loss.backward()
                return loss

            losses = [minimiser.step(closure).item() for _ in range(STEPS)]
            results |= {f"{number}.w": w.detach().numpy(), f"{number}.losses": np.array(losses)}
        return results


METRICS = [3.0, 2.9, 2.9, 2.95, 2.8999, 3.1, 2.0, 2.5, 2.4, 2.3, 2.2, 2.1, 2.1, 2.1, -1.0, -1.00005]
METRICS = [*METRICS, -0.9, -0.9, -0.9, -0.9, -2.0, -1.9, -1.9, -1.9, -1.9, -1.9]


@dataclass(frozen=True)
class PlateauCase:
    """The rates that follow from metrics."""

    name: str
    settings: dict
    tolerance: float = 1e-12
    gradient_tolerance: float = 0.0
    metrics: list = field(default_factory=lambda: METRICS)

    @property
    def num_sets(self):
        return len(self.metrics)

    def ours(self, dtype):
        plateau = af.optim.ReduceLROnPlateau(nn.Buffer((4,), dtype="float64"), 0.3, **self.settings)
        return {"rates": np.array([plateau.step(metric) for metric in self.metrics])}

    def torchs(self, torch):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **self.settings)
        rates = []
        for metric in self.metrics:
            plateau.step(metric)
            rates.append(optimizer.param_groups[0]["lr"])
        return {"rates": np.array(rates)}


CASES = [
    # One of the problems is so flat that float32 of torch itself ends 1e-4 off its float64.
    LbfgsCase("LBFGS", {"max_iter": 4}, tolerance=5e-4),
    LbfgsCase(
        "LBFGS of a short history", {"lr": 0.8, "max_iter": 5, "history_size": 2}, tolerance=1e-3
    ),
    LbfgsCase("LBFGS that may evaluate three times", {"max_iter": 8, "max_eval": 3}),
    LbfgsCase(
        "LBFGS with a line search, to the end",
        {"max_iter": 60, "line_search_fn": "strong_wolfe", "tolerance_grad": 1e-6},
        tolerance=2e-3,
    ),
    PlateauCase("plateau", {"patience": 2}),
    PlateauCase("plateau of a maximum", {"mode": "max", "patience": 1, "factor": 0.5}),
    PlateauCase(
        "plateau with a cooldown and a least rate",
        {"patience": 0, "cooldown": 2, "min_lr": 0.01, "threshold": 0.01, "factor": 0.3},
    ),
    PlateauCase(
        "plateau of differences",
        {"patience": 1, "threshold": 0.15, "threshold_mode": "abs", "eps": 1e-3},
    ),
]


def test_steps_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
