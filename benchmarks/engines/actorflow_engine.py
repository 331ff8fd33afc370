"""actorflow as an engine of the comparison, through `stream` of a job alone."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from rows.row import Row  # noqa: E402

import actorflow as af  # noqa: E402
from actorflow import nn  # noqa: E402
from actorflow.bench.flops import model_flops  # noqa: E402
from actorflow.bench.launch_times import launch_times_ns  # noqa: E402
from actorflow.bench.launches import launch_table  # noqa: E402
from actorflow.compile.native import ready_native  # noqa: E402
from actorflow.data.source import spec_of  # noqa: E402
from actorflow.settings import Settings  # noqa: E402
from actors.kernels.native import runtime  # noqa: E402
from actors.kernels.native.gemm import gemm_of, view_of_array  # noqa: E402
from actors.kernels.native.gemm_launch import gemm_launch, workspace_bytes  # noqa: E402
from actors.kernels.native.matmul import LIBRARIES  # noqa: E402
from engines.serve import gemm_operands, mean_square, serve  # noqa: E402


class Tiny(nn.Module):
    def __init__(self, layers: int, width: int):
        bounds = (("kind", "zeros"),)
        self.layers = [
            {
                "w": nn.Parameter((width, width), bounds),
                "b": nn.Parameter((width,), bounds),
                "g": nn.Parameter((width,), bounds),
            }
            for _ in range(layers)
        ]

    def __call__(self, x):
        for i, layer in enumerate(self.layers):
            h = x @ layer["w"] + layer["b"]
            x = (af.relu(h) if i % 2 else af.tanh(h)) * layer["g"]
        return x


class Chain(nn.Module):
    """Linear layers with relu between them."""

    def __init__(self, widths: tuple[int, ...]):
        pairs = itertools.pairwise(widths)
        self.layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairs]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = af.relu(layer(x))
        return self.layers[-1](x)


class GPT(nn.Module):
    def __init__(self, layers, width, heads, seq, vocab, **_):
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = [nn.TransformerBlock(width, heads=heads, causal=True) for _ in range(layers)]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Block(nn.Module):
    def __init__(self, batch: int, seq: int, width: int, heads: int):
        self.x = nn.Parameter((batch, seq, width), (("kind", "zeros"),))
        self.block = nn.TransformerBlock(width, heads=heads, causal=True)

    def __call__(self):
        return self.block(self.x)


class WideDeep(Chain):
    def __init__(self, widths, tables, rows, dim, dense, **_):
        super().__init__(widths)
        self.tables = [nn.Embedding(rows, dim) for _ in range(tables)]
        self.wide = nn.Linear(dense, widths[-1])

    def __call__(self, ids, dense):
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return super().__call__(af.concat([*found, dense], axis=1)) + self.wide(dense)


Loss = Callable[[nn.Module, object], object]


def tiny(row: Row) -> tuple[nn.Module, Loss]:
    return Tiny(**row.sizes), lambda m, b: af.mse_loss(m(b.x), b.y)


def mlp(row: Row) -> tuple[nn.Module, Loss]:
    return Chain(widths_of(row)), lambda m, b: af.cross_entropy(m(b.x), b.y)


def gpt(row: Row) -> tuple[nn.Module, Loss]:
    if not row.is_training:
        return GPT(**row.sizes), lambda m, b: m(b.x)
    return GPT(**row.sizes), lambda m, b: af.cross_entropy(m(b.x), b.y)


def gpt2_block(row: Row) -> tuple[nn.Module, Loss]:
    return Block(**row.sizes), lambda m, b: af.mse_loss(m(), b.y)


def wide_deep(row: Row) -> tuple[nn.Module, Loss]:
    model = WideDeep(widths_of(row), **row.sizes)
    return model, lambda m, b: af.cross_entropy(m(b.ids, b.dense), b.y)


FAMILIES = {f.__name__: f for f in (tiny, mlp, gpt, gpt2_block, wide_deep)}


def widths_of(row: Row) -> tuple[int, ...]:
    found = [row.weights()[f"layers.{i}.weight"].shape for i in range(row.sizes["layers"])]
    return (found[0][1], *(shape[0] for shape in found))


class OnDemand:
    """A data source that gives as many batches as were asked for, and then waits."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._batches, self._count = batches, 0
        self._allowed = threading.Semaphore(0)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def spec(self):
        return spec_of(self._batches[0])

    def __next__(self):
        self._allowed.acquire()
        self._count += 1
        return self._batches[(self._count - 1) % len(self._batches)]

    def state(self):
        return {"count": self._count}

    def restore(self, state) -> None:
        self._count = state["count"]

    def fingerprint(self) -> str:
        return "on demand"


@dataclass(slots=True)
class Session:
    """A stream of a job; the plan runs ahead of who reads it only as far as steps are allowed."""

    job: af.Job
    model: nn.Module
    data: OnDemand
    stream: Iterator[dict[str, np.ndarray]]

    def step(self) -> float:
        self.data.allow(1)
        found = next(self.stream)
        return float(found["loss"]) if "loss" in found else mean_square(found["output"])

    def run(self, steps: int) -> None:
        self.data.allow(steps)
        for _ in range(steps):
            next(self.stream)

    def describe(self) -> dict[str, object]:
        graph = self.job.graph(self.model, self.data.spec())
        return {"flops": model_flops(graph), "settings": f"actorflow {af.__version__}"}

    def launches(self) -> list[dict[str, object]]:
        plan = self.job.compile(self.model, self.data)
        values = {name: parameter.data for name, parameter in self.model.named_parameters()}
        return launch_table(plan, launch_times_ns(plan, values))


class Actorflow:
    def prepare(self, row: Row, precision: str, variant: str) -> Session:
        model, loss = FAMILIES[row.family](row)
        model.load(row.weights())
        loss.__name__ = row.name
        options = {"optimizer": optimizer_of(row)} if row.is_training else {"train": False}
        if precision != "fp32":
            if "precision" not in inspect.signature(af.job).parameters:
                raise SystemExit(f"this actorflow has no precision={precision!r} yet")
            options["precision"] = precision
        data = OnDemand(row.batches() if row.is_training else without(row.batches(), "y"))
        job = af.job(loss, **options)
        return Session(job, model, data, job.stream(model, data))

    def gemm(self) -> dict[str, Callable[[], object]]:
        a, b = gemm_operands()
        out = np.empty_like(a)
        found = {"numpy": lambda: np.matmul(a, b, out=out)}
        return found | native_gemms(a, b, out)


def native_gemms(a, b, out) -> dict[str, Callable[[], object]]:
    """Return the product by every native library that takes it."""
    ready_native(Settings.from_env(os.environ))
    gemm = gemm_of(*[view_of_array(array) for array in (a, b, out)])
    found = {}
    for library in LIBRARIES if runtime.is_on() else ():
        size = workspace_bytes(library, gemm)
        if size is not None:
            raw = np.empty(size + 64, np.uint8)
            workspace = raw[-raw.ctypes.data % 64 :][:size]
            found[library.name] = gemm_launch(library, gemm, (a, b, out), workspace)
    return found


def optimizer_of(row: Row):
    wanted = row.optimizer
    if wanted.kind == "sgd":
        return af.optim.SGD(wanted.rate)
    return af.optim.AdamW(wanted.rate, weight_decay=wanted.decay)


def without(batches: list[dict[str, np.ndarray]], name: str) -> list[dict[str, np.ndarray]]:
    return [{n: a for n, a in batch.items() if n != name} for batch in batches]


if __name__ == "__main__":
    serve(Actorflow)
