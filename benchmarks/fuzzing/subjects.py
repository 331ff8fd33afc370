"""The five plans that are mutated: together they have every kind of actor, register and launch."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np

import actorflow as af
from actorflow import nn
from actorflow.compile import num_streams
from actorflow.compile.targets import HostTarget
from actorflow.environment.settings import Settings
from actorflow.run.runner import Runner
from compiler.contract.plan import Plan

STEPS = 4
NAMES = ("gpt", "mlp", "accumulate", "streams", "bf16", "scan")


class GPT(nn.Module):
    """The demo's model, small."""

    def __init__(self):
        self.emb, self.pos = nn.Embedding(23, 16), nn.Embedding(6, 16)
        self.blocks = [nn.TransformerBlock(16, heads=2, causal=True) for _ in range(2)]
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 23)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class MLP(nn.Module):
    """Groups, dropout, and a table of ids."""

    def __init__(self):
        self.emb, self.up, self.down = nn.Embedding(9, 8), nn.Linear(8, 24), nn.Linear(24, 5)
        self.drop = nn.Dropout(0.2)

    def __call__(self, x):
        return self.down(self.drop(af.gelu(self.up(self.emb(x)), approximate="tanh")))


class Towers(nn.Module):
    """Two networks side by side, for two streams."""

    def __init__(self):
        self.left, self.right = MLP(), MLP()

    def __call__(self, x):
        return self.left(x) * self.right(x)


class Recurrent(nn.Module):
    """A loop over ids, with a choice in every step."""

    def __init__(self):
        self.emb, self.cell, self.down = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def __call__(self, x):
        def step(h, row):
            new = af.tanh(self.cell(h) + row)
            return af.cond(new.sum() > 0.0, lambda: new, lambda: new * 0.5), new

        rows = self.emb(x).reshape(-1, 1, 8)
        _, hs = af.scan(step, np.ones((1, 8), np.float32), rows)
        return self.down(hs.reshape(-1, 8))


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())


@af.job(train=False)
def evaluate(model, batch):
    return {"loss": loss(model, batch)}


def ids(rows: int, classes: int, num_ids: int, seq: int = 0):
    """Return a source of ids and labels."""
    rng = np.random.default_rng(7)
    shape = (8 * rows, seq) if seq else (8 * rows,)
    x = rng.integers(0, num_ids, shape).astype(np.int32)
    y = rng.integers(0, classes, shape).astype(np.int32)
    return af.data.ArraySource({"x": x, "y": y}, batch=rows, seed=3)


def data(name: str):
    """Return a fresh source for a plan."""
    return ids(4, 23, 23, seq=6) if name == "gpt" else ids(8, 5, 9)


def _job(name: str):
    options: dict = {
        "gpt": {"optimizer": af.optim.AdamW(1e-2)},
        "mlp": {"optimizer": af.optim.AdamW(1e-2)},
        "scan": {"optimizer": af.optim.SGD(0.1)},
        "accumulate": {"optimizer": af.optim.SGD(0.1), "accumulate": 2},
        "streams": {"optimizer": af.optim.AdamW(1e-2), "streams": 2, "metrics_every": 2},
        "bf16": {
            "optimizer": af.optim.SGD(0.1, momentum=0.9),
            "precision": "bf16",
            "recompute": "blocks",
        },
    }[name]
    return af.job(deterministic=True, seed=3, **options)(loss)


def evaluation(name: str):
    """Return the evaluation that a plan was compiled with; None for most."""
    if name != "accumulate":
        return None
    return af.Evaluation(evaluate, data(name), every=2, batches=2)


def compiled(name: str) -> Plan:
    """Compile one of the plans."""
    model = {"gpt": GPT, "streams": Towers, "scan": Recurrent}.get(name, MLP)()
    # So that a small model is cut into many chains, on every stream that is asked for.
    with (
        mock.patch.object(HostTarget, "message_ns", 100.0),
        mock.patch.object(num_streams, "asks_for_choice", return_value=False),
    ):
        return _job(name).compile(model, data(name), every=2, evaluation=evaluation(name))


def results(name: str, plan: Plan, settings: Settings) -> dict[str, bytes]:
    """Train a few steps with a plan; return what came of it, bit for bit."""
    bits: dict[str, bytes] = {}

    def on_step(step: int, outputs) -> None:
        for key, value in outputs.items():
            bits[f"step {step} {key}"] = np.asarray(value).tobytes()

    runner = Runner(plan, seed=5, settings=settings)
    fitted = runner.fit(
        data(name), steps=STEPS, progress=False, on_step=on_step, evaluation=evaluation(name)
    )
    for step, means in fitted.evaluations:
        bits |= {f"evaluation {step} {k}": np.float64(v).tobytes() for k, v in means.items()}
    return bits | {name: array.tobytes() for name, array in fitted.variables.items()}


def save_all(folder: Path, names: tuple[str, ...]) -> None:
    """Compile the plans into files of a folder."""
    for name in names:
        compiled(name).save(folder / f"{name}.plan")
