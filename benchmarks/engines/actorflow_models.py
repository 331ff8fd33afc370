"""The rows as models, losses, data and optimizers of actorflow: of its public names alone.

So that two checkouts, whatever their insides, can run the same.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
from models.dlrm import DLRM
from models.lenet import LeNet5
from models.resnet import resnet18, resnet50
from models.unet import UNet
from models.vit import VisionTransformer
from models.wide_deep import WideDeep
from rows.row import Row

import actorflow as af
from actorflow import nn
from actorflow.data.source import spec_of
from actorflow.run.predictor import Predictor
from compiler.contract.host_arrays import freeze
from engines.serve import mean_square


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
    """Without a head of its own the table of words is the head, too."""

    def __init__(self, layers, width, heads, seq, vocab, has_head=True, **_):
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = [nn.TransformerBlock(width, heads=heads, causal=True) for _ in range(layers)]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab) if has_head else None

    def __call__(self, x):
        h = self.emb(x) + self.pos.weight
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return af.linear(h, self.emb.weight) if self.head is None else self.head(h)


class BertBlock(nn.Module):
    """A block whose norms stand after the sums."""

    def __init__(self, width: int, heads: int):
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Attention(width, heads=heads), nn.MLP(width)

    def __call__(self, x):
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


class Bert(nn.Module):
    def __init__(self, layers, width, heads, seq, vocab, **_):
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.segment = nn.Embedding(2, width)
        self.first, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = [BertBlock(width, heads) for _ in range(layers)]
        self.dense = nn.Linear(width, width)
        self.bias = nn.Parameter((vocab,), (("kind", "zeros"),))

    def __call__(self, x, segments, places):
        """Return the scores of all words at some places of the texts laid end to end."""
        h = self.first(self.emb(x) + self.pos.weight + self.segment(segments))
        for block in self.blocks:
            h = block(h)
        batch, seq, width = h.shape
        masked = af.embedding(places, h.reshape(batch * seq, width))
        masked = self.last(af.gelu(self.dense(masked), approximate="tanh"))
        return af.linear(masked, self.emb.weight, self.bias)


class Block(nn.Module):
    def __init__(self, batch: int, seq: int, width: int, heads: int):
        self.x = nn.Parameter((batch, seq, width), (("kind", "zeros"),))
        self.block = nn.TransformerBlock(width, heads=heads, causal=True)

    def __call__(self):
        return self.block(self.x)


class OneTable(Chain):
    """Wide & Deep with one table, of which each sample reads several rows."""

    def __init__(self, widths, rows, dim, dense):
        super().__init__(widths)
        self.tables, self.wide = [nn.Embedding(rows, dim)], nn.Linear(dense, widths[-1])

    def __call__(self, dense, ids):
        x = af.concat([self.tables[0](ids).flatten(1), dense], axis=1)
        return super().__call__(x) + self.wide(dense)


class Recurrent(nn.Module):
    def __init__(self, layers, width, vocab, **_):
        self.emb, self.lstm = nn.Embedding(vocab, width), nn.LSTM(width, width, layers)
        self.head = nn.Linear(width, vocab)

    def __call__(self, x):
        return self.head(self.lstm(self.emb(x))[0])


Loss = Callable[[nn.Module, object], object]


def tiny(row: Row) -> tuple[nn.Module, Loss]:
    return Tiny(**row.sizes), lambda m, b: af.mse_loss(m(b.x), b.y)


def scored(row: Row, model: nn.Module) -> tuple[nn.Module, Loss]:
    """Return a model of x with its loss; an inference has scores instead."""
    if not row.is_training:
        return model, lambda m, b: m(b.x)
    return model, lambda m, b: af.cross_entropy(m(b.x), b.y)


def mlp(row: Row) -> tuple[nn.Module, Loss]:
    return scored(row, Chain(widths_of(row)))


def gpt(row: Row) -> tuple[nn.Module, Loss]:
    if not row.is_training:
        return scored(row, GPT(**row.sizes))
    return GPT(**row.sizes), lambda m, b: af.cross_entropy(m(b.x).flatten(0, -2), b.y.flatten())


def gpt2(row: Row) -> tuple[nn.Module, Loss]:
    model = GPT(**row.sizes, has_head=False)
    return model, lambda m, b: af.cross_entropy(m(b.x).flatten(0, -2), b.y.flatten())


def bert(row: Row) -> tuple[nn.Module, Loss]:
    model = Bert(**row.sizes)
    return model, lambda m, b: af.cross_entropy(m(b.x, b.segments, b.places), b.y)


def gpt2_block(row: Row) -> tuple[nn.Module, Loss]:
    return Block(**row.sizes), lambda m, b: af.mse_loss(m(), b.y)


def wide_deep(row: Row) -> tuple[nn.Module, Loss]:
    rows, dim, dense = [row.sizes[name] for name in ("rows", "dim", "dense")]
    widths, count = widths_of(row), row.sizes["tables"]
    if count == 1:
        model = OneTable(widths, rows, dim, dense)
    else:
        model = WideDeep([rows] * count, dense, dim, widths[1:])
    return model, lambda m, b: af.cross_entropy(m(b.dense, b.ids), b.y)


def dlrm(row: Row) -> tuple[nn.Module, Loss]:
    sizes = row.sizes
    model = DLRM([sizes["rows"]] * sizes["tables"], sizes["dense"], sizes["dim"])
    return model, lambda m, b: af.binary_cross_entropy_with_logits(m(b.dense, b.ids), b.y)


def lstm(row: Row) -> tuple[nn.Module, Loss]:
    model = Recurrent(**row.sizes)
    return model, lambda m, b: af.cross_entropy(m(b.x).flatten(0, -2), b.y.flatten())


def lenet(row: Row) -> tuple[nn.Module, Loss]:
    return scored(row, LeNet5())


def resnet(row: Row) -> tuple[nn.Module, Loss]:
    make = resnet18 if row.sizes["depth"] == 18 else resnet50
    stem = "cifar" if row.sizes["stem"] == 3 else "imagenet"
    return scored(row, make(row.sizes["classes"], stem=stem))


def unet(row: Row) -> tuple[nn.Module, Loss]:
    names = ("channels", "width", "depth")
    return scored(row, UNet(row.sizes["classes"], **{n: row.sizes[n] for n in names}))


def vit(row: Row) -> tuple[nn.Module, Loss]:
    sizes = row.sizes
    shape = {"size": sizes["extent"], "patch": sizes["patch"], "dim": sizes["width"]}
    depth = {"depth": sizes["layers"], "heads": sizes["heads"]}
    return scored(row, VisionTransformer(sizes["classes"], **shape, **depth))


_OF_TEXTS = (gpt, gpt2, bert, gpt2_block, lstm)
_OF_PICTURES = (lenet, resnet, unet, vit)
FAMILIES = {f.__name__: f for f in (tiny, mlp, wide_deep, dlrm, *_OF_TEXTS, *_OF_PICTURES)}


def widths_of(row: Row) -> tuple[int, ...]:
    shapes = [row.weights()[f"layers.{i}.weight"].shape for i in range(row.sizes["layers"])]
    return (shapes[0][1], *(shape[0] for shape in shapes))


class Rounds:
    """A data source that goes round some batches, and can be sought."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        self._batches, self._count = batches, 0

    def spec(self):
        return spec_of(self._batches[0])

    def __next__(self):
        self._count += 1
        return self._batches[(self._count - 1) % len(self._batches)]

    def state(self):
        return {"count": self._count}

    def restore(self, state) -> None:
        self._count = state["count"]

    def fingerprint(self) -> str:
        return "rounds"


class OnDemand(Rounds):
    """Rounds of as many batches as were asked for; then it waits."""

    def __init__(self, batches: list[dict[str, np.ndarray]]) -> None:
        super().__init__(batches)
        self._allowed = threading.Semaphore(0)

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """The first one."""
        return self._batches[0]

    def request(self) -> dict[str, np.ndarray]:
        """Return the next one without waiting, for who hands it over himself."""
        return super().__next__()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def __next__(self):
        self._allowed.acquire()
        return super().__next__()


def optimizer_of(row: Row):
    spec = row.optimizer
    if spec.kind == "sgd":
        return af.optim.SGD(spec.rate)
    return af.optim.AdamW(spec.rate, weight_decay=spec.decay)


def without(batches: list[dict[str, np.ndarray]], name: str) -> list[dict[str, np.ndarray]]:
    return [{n: a for n, a in batch.items() if n != name} for batch in batches]


@dataclass(slots=True)
class Running:
    """A stream of a job; the plan runs ahead of who reads it only as far as steps are allowed.

    An inference is a call of a predictor for each batch, whose answer is waited for, as that of any
    engine is.
    """

    job: af.Job
    model: nn.Module
    data: OnDemand
    stream: Iterator[dict[str, np.ndarray]]
    predictor: Predictor | None = None

    def step(self) -> float:
        if not self.job.options.train:
            return mean_square(self.predict(self.data.request())["output"])
        self.data.allow(1)
        return float(next(self.stream)["loss"])

    def run(self, steps: int) -> None:
        if not self.job.options.train:
            for _ in range(steps):
                self.predict(self.data.request())
            return
        self.data.allow(steps)
        for _ in range(steps):
            next(self.stream)

    def predict(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.predictor is None:
            self.predictor = self.job.predictor(self.model, batch)
        return self.predictor(batch)

    def plan(self):
        return self.job.compile(self.model, self.data)


R = TypeVar("R", bound=Running)


def start(row: Row, precision: str, session: type[R], **options: object) -> R:
    """Make a row's job; it is compiled at its first step. `options` are more of the job's."""
    model, loss = FAMILIES[row.family](row)
    weights = row.weights()
    for array in weights.values():
        freeze(array)  # so that the model takes it, as torch does, without a copy
    model.load(weights)
    job = job_of(row, precision, loss, **options)
    data = OnDemand(row.batches() if row.is_training else without(row.batches(), "y"))
    return session(job, model, data, job.stream(model, data) if row.is_training else iter(()))


def job_of(row: Row, precision: str, loss: Loss, **options: object) -> af.Job:
    """Return the job of a row's loss, with more options of a job."""
    loss.__name__ = row.name
    options |= {"optimizer": optimizer_of(row)} if row.is_training else {"train": False}
    if precision != "fp32":
        options["precision"] = precision
    return af.job(loss, **options)
