"""Learning-rate schedules against torch's, at every step."""

import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

import actorflow as af
from actorflow import nn

STEPS = 80
LR = 0.3
optim = af.optim


@dataclass(frozen=True)
class ScheduleCase:
    """A schedule of ours, and torch's for an optimizer whose rate is LR. `steps` are compared."""

    name: str
    schedule: object
    torch_make: object
    steps: int = STEPS
    tolerance: float = 1e-6
    gradient_tolerance: float = 0.0

    @property
    def num_sets(self):
        return self.steps

    def ours(self, dtype):
        return {"rate": values(dtype)[self.name][: self.steps]}

    def torchs(self, torch):
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=LR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own use of steps
            scheduler = self.torch_make(torch.optim.lr_scheduler, optimizer)
            rates = []
            for _ in range(self.steps):
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                if len(rates) < self.steps:
                    scheduler.step()
        return {"rate": np.array(rates, np.float64)}


@lru_cache
def values(dtype):
    """Return the rates of all cases by name: one job computes them step by step."""

    @af.job(train=False)
    def rates(model, batch):
        return {case.name: case.schedule(batch.step) for case in CASES}

    model, found = nn.Module(), []
    for step in range(STEPS):
        found.append(dict(rates.step(model, {"step": np.array(step, dtype)})))
    rates.close(model)
    return {case.name: np.array([row[case.name] for row in found]) for case in CASES}


CASES = [
    ScheduleCase("constant", optim.constant(LR), lambda s, o: s.ConstantLR(o, 1.0)),
    ScheduleCase(
        "linear",
        optim.linear(LR, steps=37, final=0.03),
        lambda s, o: s.LinearLR(o, 1.0, 0.1, total_iters=37),
    ),
    *[
        ScheduleCase(
            f"polynomial {power}",
            optim.polynomial(LR, steps=50, power=power),
            lambda s, o, power=power: s.PolynomialLR(o, 50, power),
        )
        for power in (0.5, 1.0, 2.0, 3.5)
    ],
    ScheduleCase(
        "cosine",
        optim.cosine(LR, steps=60, final=0.01),
        lambda s, o: s.CosineAnnealingLR(o, 60, 0.01),
        61,
    ),
    *[
        ScheduleCase(
            f"cosine_restarts {steps} {mult}",
            optim.cosine_restarts(LR, steps=steps, mult=mult, final=0.02),
            lambda s, o, a=(steps, mult): s.CosineAnnealingWarmRestarts(o, *a, 0.02),
        )
        for steps, mult in ((10, 1), (7, 1), (5, 2), (1, 2), (3, 3), (1, 3))
    ],
    *[
        ScheduleCase(
            f"step {every} {gamma}",
            optim.step(LR, every=every, gamma=gamma),
            lambda s, o, a=(every, gamma): s.StepLR(o, *a),
        )
        for every, gamma in ((30, 0.1), (7, 0.7), (1, 0.99), (49, 0.0))
    ],
    *[
        ScheduleCase(
            f"multi_step {milestones}",
            optim.multi_step(LR, milestones=milestones, gamma=0.3),
            lambda s, o, m=milestones: s.MultiStepLR(o, m, 0.3),
        )
        for milestones in ([30, 60], [1], [5, 6, 7, 50])
    ],
    *[
        ScheduleCase(
            f"exponential {gamma}",
            optim.exponential(LR, gamma=gamma),
            lambda s, o, gamma=gamma: s.ExponentialLR(o, gamma),
        )
        for gamma in (0.9, 0.9999, 1.01)
    ],
    *[
        ScheduleCase(
            f"one_cycle {own}",
            optim.one_cycle(LR, steps=STEPS, **own),
            lambda s, o, own=own: s.OneCycleLR(o, LR, total_steps=STEPS, **own),
        )
        for own in (
            {},
            {"pct_start": 0.1},
            {"pct_start": 0.47, "div_factor": 3.0},
            {"final_div_factor": 10.0},
            {"pct_start": 0.25, "three_phase": True},
            {"pct_start": 0.33, "three_phase": True, "div_factor": 4.0},
        )
    ],
    ScheduleCase(
        "warmup",
        optim.warmup(optim.exponential(LR, gamma=0.97), steps=9),
        lambda s, o: s.LambdaLR(o, lambda t: min((t + 1) / 9, 1) * 0.97**t),
    ),
    ScheduleCase(
        "wsd",
        optim.wsd(LR, warmup=10, stable=30, decay=20, final=0.03),
        lambda s, o: s.LambdaLR(
            o, lambda t: min((t + 1) / 10, 1) - 0.9 * min(max(t - 40, 0) / 20, 1)
        ),
    ),
    ScheduleCase(
        "chain",
        optim.chain(
            [optim.exponential(LR, gamma=0.9), optim.step(LR, every=5), 0.3], milestones=[20, 43]
        ),
        lambda s, o: s.SequentialLR(
            o, [s.ExponentialLR(o, 0.9), s.StepLR(o, 5), s.ConstantLR(o, 1.0)], [20, 43]
        ),
    ),
]


def test_rates_of_all_steps_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
