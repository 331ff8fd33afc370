"""Optimizers against torch: parameters after one step and after twenty, by several settings each.

All settings of an optimizer are groups of one job: `s0` has the optimizer's own. Gradients are fed.
"""

from dataclasses import dataclass

import numpy as np
from oracle import seeded

import actorflow as af
from actorflow import nn
from compiler.contract.types import DType

STEPS = 20
SHAPES = ((5,), (4, 3), (1,), (), (2, 3, 4))


class Piece(nn.Module):
    def __init__(self, shapes, dtype):
        self.p = [nn.Parameter(shape, (("kind", "zeros"),), DType(dtype)) for shape in shapes]


class Pieces(nn.Module):
    """The same parameters once for each setting; their gradients are the batch."""

    def __init__(self, count, shapes, dtype):
        for number in range(count):
            setattr(self, f"s{number}", Piece(shapes, dtype))
        self.load({name: start(int(name.rpartition(".")[2]), shapes).astype(dtype)
                   for name, _ in self.named_parameters()})  # fmt: skip

    def __call__(self, batch):
        terms = [
            (p * batch[f"g{name.rpartition('.')[2]}"]).sum() for name, p in self.named_parameters()
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


def start(number, shapes):
    return np.asarray(seeded("start", number).normal(size=shapes[number]))


def slope(step, number, shapes):
    """Return a gradient of a step; some are 0, in one step all."""
    made = np.asarray(seeded("slope", step, number).normal(size=shapes[number]))
    return np.asarray(np.where(np.abs(made) < 0.1, 0.0, made) * (step != 7))


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer of ours, torch's of the same settings, and several of them."""

    name: str
    make: object
    torch_make: object
    sets: tuple
    shapes: tuple = SHAPES
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-5

    @property
    def num_sets(self):
        return len(self.sets) * len(self.shapes)

    def ours(self, dtype):
        groups = [af.optim.group(f"s{n}.*", **own) for n, own in enumerate(self.sets) if n]
        optimizer = self.make(**self.sets[0], groups=groups)
        job = af.job(lambda model, batch: model(batch), optimizer=optimizer)
        model, found = Pieces(len(self.sets), self.shapes, dtype), {}
        for step in range(STEPS):
            fed = {
                f"g{n}": np.asarray(slope(step, n, self.shapes).astype(dtype))
                for n in range(len(self.shapes))
            }
            job.step(model, fed)
            if step in (0, STEPS - 1):
                found |= {f"{name} after {step + 1}": np.array(value)
                          for name, value in model.state().items()}  # fmt: skip
        job.close(model)
        return found

    def torchs(self, torch):
        found = {}
        for place, own in enumerate(self.sets):
            params = [
                torch.nn.Parameter(torch.tensor(start(n, self.shapes)))
                for n in range(len(self.shapes))
            ]
            optimizer = self.torch_make(torch)(params, **own)
            for step in range(STEPS):
                for n, p in enumerate(params):
                    p.grad = torch.tensor(slope(step, n, self.shapes))
                optimizer.step()
                if step in (0, STEPS - 1):
                    found |= {f"s{place}.p.{n} after {step + 1}": p.detach().numpy().copy()
                              for n, p in enumerate(params)}  # fmt: skip
        return found


def written(update):
    """Return a torch optimizer that a function of (parameter, gradient, state, step) is."""

    def make(torch):
        class Written:
            def __init__(self, params, **own):
                self.params, self.own, self.step_number = params, own, 0
                self.states = [{} for _ in params]

            def step(self):
                self.step_number += 1
                with torch.no_grad():
                    for p, state in zip(self.params, self.states, strict=True):
                        update(torch, p, p.grad, state, self.step_number, **self.own)

        return Written

    return make


def lion(torch, p, g, state, t, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
    """Chen et al., 2023, algorithm 2."""
    g = -g if maximize else g
    m = state.get("m", torch.zeros_like(p))
    c = betas[0] * m + (1 - betas[0]) * g
    p.copy_(p - lr * (torch.sign(c) + weight_decay * p))
    state["m"] = betas[1] * m + (1 - betas[1]) * g


def lamb(
    torch, p, g, state, t,
    lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, maximize=False,
):  # fmt: skip
    """You et al., 2020, algorithm 2."""
    g = -g if maximize else g
    zeros = torch.zeros_like(p)
    m = betas[0] * state.get("m", zeros) + (1 - betas[0]) * g
    v = betas[1] * state.get("v", zeros) + (1 - betas[1]) * g * g
    state |= {"m": m, "v": v}
    r = m / (1 - betas[0] ** t) / (torch.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * p
    has_both = float(p.norm()) > 0 and float(r.norm()) > 0
    p.copy_(p - lr * (p.norm() / r.norm() if has_both else 1.0) * r)


def wide_muon(torch):
    """Return torch's Muon with products that are not rounded to bfloat16."""
    from torch.optim import _muon

    def orthogonal(g, coefficients, steps, eps):
        a, b, c = coefficients
        x = g.T if g.shape[0] > g.shape[1] else g
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.T if g.shape[0] > g.shape[1] else x

    class WideMuon(torch.optim.Muon):
        def step(self):
            own, _muon._zeropower_via_newtonschulz = _muon._zeropower_via_newtonschulz, orthogonal
            try:
                return super().step()
            finally:
                _muon._zeropower_via_newtonschulz = own

    return WideMuon


MATRICES = ((4, 3), (3, 4), (1, 5), (5, 1), (6, 6), (1, 1))
MUON_SETS = (
    {},
    {"lr": 0.05, "weight_decay": 0.0},
    {"lr": 0.05, "nesterov": False, "momentum": 0.8},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 0.02, "ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5)},
    {"lr": 0.05, "eps": 0.1, "momentum": 0.0},
)

CASES = [
    OptimizerCase(
        "sgd", af.optim.SGD, lambda t: t.optim.SGD,
        (
            {"lr": 0.1},
            {"lr": 0.1, "weight_decay": 0.1},
            {"lr": 0.05, "momentum": 0.9},
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True},
            {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.5, "dampening": 0.9, "maximize": True},
            {"lr": 0.1, "maximize": True, "weight_decay": 0.1},
            {"lr": 0.03, "momentum": 0.9, "nesterov": True, "maximize": True},
        ),
    ),
    *[
        OptimizerCase(
            name.lower(), getattr(af.optim, name), lambda t, name=name: getattr(t.optim, name),
            (
                {},
                {"lr": 0.1, "weight_decay": 0.1},
                {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-3},
                {"lr": 0.02, "betas": (0.0, 0.5), "weight_decay": 0.3},
                {"lr": 0.05, "amsgrad": True, "betas": (0.9, 0.5)},
                {"lr": 0.05, "amsgrad": True, "weight_decay": 0.2, "betas": (0.5, 0.6)},
                {"lr": 0.03, "maximize": True, "weight_decay": 0.1},
                {"lr": 0.03, "maximize": True, "amsgrad": True, "eps": 0.1},
            ),
        )
        for name in ("Adam", "AdamW")
    ],
    OptimizerCase(
        "adagrad", af.optim.Adagrad, lambda t: t.optim.Adagrad,
        (
            {},
            {"lr": 0.1, "lr_decay": 0.3},
            {"lr": 0.1, "weight_decay": 0.2},
            {"lr": 0.1, "initial_accumulator_value": 0.5},
            {"lr": 0.2, "eps": 0.1, "lr_decay": 0.01, "weight_decay": 0.1},
            {"lr": 0.1, "maximize": True, "initial_accumulator_value": 0.1},
        ),
    ),
    OptimizerCase(
        "rmsprop", af.optim.RMSprop, lambda t: t.optim.RMSprop,
        (
            {"lr": 0.01},
            {"lr": 0.02, "alpha": 0.9, "weight_decay": 0.1},
            {"lr": 0.02, "alpha": 0.8, "centered": True, "eps": 1e-3},
            {"lr": 0.01, "momentum": 0.9},
            {"lr": 0.01, "momentum": 0.5, "centered": True, "weight_decay": 0.1, "eps": 1e-2},
            {"lr": 0.01, "maximize": True, "eps": 0.1},
            {},
        ),
    ),
    OptimizerCase(
        "lion", af.optim.Lion, lambda t: written(lion)(t),
        (
            {},
            {"lr": 0.01},
            {"lr": 0.01, "weight_decay": 0.5},
            {"lr": 0.02, "betas": (0.5, 0.6)},
            {"lr": 0.02, "betas": (0.95, 0.98), "weight_decay": 0.1},
            {"lr": 0.01, "maximize": True, "weight_decay": 0.1},
        ),
    ),
    OptimizerCase(
        "lamb", af.optim.LAMB, lambda t: written(lamb)(t),
        (
            {},
            {"lr": 0.05},
            {"lr": 0.02, "weight_decay": 0.0, "eps": 1e-3},
            {"lr": 0.02, "betas": (0.5, 0.6)},
            {"lr": 0.02, "betas": (0.0, 0.9), "weight_decay": 0.3},
            {"lr": 0.02, "maximize": True},
        ),
    ),
    OptimizerCase(
        "adafactor", af.optim.Adafactor, lambda t: t.optim.Adafactor,
        (
            {"eps": (1e-10, 1e-3)},
            {"lr": 0.1, "eps": (1e-10, 1e-3)},
            {"lr": 0.1, "beta2_decay": -0.3, "eps": (1e-3, 0.5)},
            {"lr": 0.1, "d": 3.0, "weight_decay": 0.1, "eps": (1e-4, 1e-3)},
            {"lr": 0.9, "d": 1.5, "eps": (1e-10, 1e-3)},
            {"lr": 0.05, "maximize": True, "weight_decay": 0.2, "eps": (0.1, 1e-3)},
        ),
        tolerance=1e-4,
    ),
    OptimizerCase("muon", af.optim.Muon, wide_muon, MUON_SETS, MATRICES, tolerance=1e-4),
    OptimizerCase(
        "muon as torch rounds it", af.optim.Muon, lambda t: t.optim.Muon, MUON_SETS, MATRICES,
        tolerance=3e-2,
    ),
]  # fmt: skip


def test_parameters_after_twenty_steps_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
