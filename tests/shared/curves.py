"""Twenty steps of a model's training against the same model in torch: names, weights and losses.

A `Curve` has the model twice, ours and one written in torch, with the same names of parameters.
Weights are drawn by name and shape and given to both, so that nothing hangs on initial values.
Torch computes in float64; its losses are stored, so that tests need no torch. Optimizers come as
(pattern of names, ours, torch's, key of the loss); a pattern chooses the parameters of one.

Rounding decides on which side of 0 a unit is that is nearer to 0 than float32 can tell, and so
whether its gradient flows; training takes the losses apart from there on. How far is measured and
stored, too: torch is run with weights that are `ROUNDING` off in each step, and what its losses
move by up to a step, `PARTED` times, is what those in float32 may be off there beside the
tolerance. 16 roundings are what gradients of one step of VGG-16 on the same weights are off by, in
the median of its parameters, by native and by emulated CUDA kernels alike.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from oracle import seeded

import actorflow as af
from actorflow import nn

FOLDER = Path(__file__).resolve().parents[1] / "data" / "curves"
STEPS = 20
ROUNDING, NUM_MOVED, PARTED = 16 * 2.0**-24, 8, 4
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
PRECISION = {"float32": "fp32", "bfloat16": "bf16"}

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Optimized:
    """Which parameters an optimizer changes, ours, torch's of (torch, params), and its loss."""

    ours: Any
    torchs: Callable[[Any, list[Any]], Any]
    pattern: str = "*"
    loss: str = "loss"


def sgd(rate: float = 0.05, momentum: float = 0.9) -> tuple[Optimized]:
    """Return gradient descent over all parameters."""
    options = {"momentum": momentum}
    return (
        Optimized(
            af.optim.SGD(rate, **options),
            lambda torch, params: torch.optim.SGD(params, rate, **options),
        ),
    )


def adamw(rate: float = 1e-3, decay: float = 0.01) -> tuple[Optimized]:
    """Return AdamW over all parameters."""
    return (
        Optimized(
            af.optim.AdamW(rate, weight_decay=decay),
            lambda torch, params: torch.optim.AdamW(params, rate, weight_decay=decay),
        ),
    )


@dataclass(frozen=True)
class Curve:
    """A model of ours and torch's, with what is trained.

    `model()` is ours, `torch_model(torch)` torch's. `loss(model, batch)` and
    `torch_loss(torch, model, batch)` return a loss, or several by key. `batch(step)` are arrays,
    floats of them in float32. `names` says what names of ours are in torch where they differ:
    parts of names, replaced in order. `weights` says how first values differ from the usual.
    """

    name: str
    model: Callable[[], nn.Module]
    torch_model: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    torch_loss: Callable[[Any, Any, Any], Any]
    batch: Callable[[int], Arrays]
    optimizers: Sequence[Optimized] = sgd()
    precisions: tuple[str, ...] = ("float32",)
    names: tuple[tuple[str, str], ...] = ()
    weights: Mapping[str, float] | None = None
    """How far from 0 matrices begin, by pattern of names; 1 / sqrt(elements of a row) else."""


def classifies(model: Any, batch: Any) -> Any:
    """Return the loss of a model whose scores of x [N, classes, ...] are held against y."""
    return af.cross_entropy(model(batch.x), batch.y)


def torch_classifies(torch: Any, model: Any, batch: Any) -> Any:
    """Return the same by torch."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def first_weights(curve: Curve, model: nn.Module) -> Arrays:
    """Return first values of all parameters by our names; buffers begin as the layers say."""
    weights = {}
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        normal = seeded("weight", name, shape).standard_normal(shape)
        if len(shape) > 1:
            spread = 1.0 / np.sqrt(np.prod(shape[1:]))
            for pattern, scale in (curve.weights or {}).items():
                spread = scale if fnmatchcase(name, pattern) else spread
            weights[name] = normal * spread
        else:
            weights[name] = 0.1 * normal + (1.0 if name.endswith("weight") else 0.0)
    return {name: np.asarray(array, np.float32) for name, array in weights.items()}


def begun(curve: Curve) -> nn.Module:
    """Return our model with its first values."""
    model = curve.model()
    values = first_weights(curve, model)
    for name, parameter in model.named_parameters():
        parameter.load(values[name])
    return model


def job_of(curve: Curve, **options: Any) -> Any:
    """Return the job that trains a curve's model."""
    optimizer: Any = curve.optimizers[0].ours
    if [o.pattern for o in curve.optimizers] != ["*"]:
        optimizer = [af.optim.on(o.pattern, o.ours, loss=o.loss) for o in curve.optimizers]
    return af.job(curve.loss, optimizer=optimizer, **options)


def ours(curve: Curve, precision: str = "float32") -> dict[str, list[float]]:
    """Return the losses of twenty steps by key, of a job."""
    model, job = begun(curve), job_of(curve, precision=PRECISION[precision])
    by_key: dict[str, list[float]] = {o.loss: [] for o in curve.optimizers}
    try:
        for step in range(STEPS):
            outputs = job.step(model, curve.batch(step))
            for key, losses in by_key.items():
                losses.append(float(outputs[key]))
    finally:
        job.close(model)
    return by_key


def torchs(curve: Curve, torch: Any, moved: int | None = None) -> dict[str, list[float]]:
    """Return the same by torch in float64, all updates of a step from the values before it.

    With `moved`, a seed, each step is of weights that are up to `ROUNDING` off.
    """
    our_model, model = curve.model(), curve.torch_model(torch).double()
    renamed = {torch_name(curve, n): a for n, a in first_weights(curve, our_model).items()}
    stored = {torch_name(curve, n) for n, _ in our_model.named_stored()}
    assert stored == {*model.state_dict()}, stored ^ {*model.state_dict()}
    loaded = {n: torch.tensor(a).double() for n, a in renamed.items()}
    model.load_state_dict(loaded, strict=False)
    model.train()
    groups = [
        [p for n, p in model.named_parameters() if fnmatchcase(n, o.pattern)]
        for o in curve.optimizers
    ]
    optimizers = [
        o.torchs(torch, params) for o, params in zip(curve.optimizers, groups, strict=True)
    ]
    by_key: dict[str, list[float]] = {o.loss: [] for o in curve.optimizers}
    for step in range(STEPS):
        batch = {n: torch.tensor(_wide(a)) for n, a in curve.batch(step).items()}
        exact = {n: p.detach().clone() for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters() if moved is not None else ():
            off = seeded("moved", moved, step, name).uniform(-ROUNDING, ROUNDING, parameter.shape)
            parameter.data *= 1 + torch.tensor(off)
        outputs = curve.torch_loss(torch, model, batch)
        outputs = outputs if isinstance(outputs, dict) else {"loss": outputs}
        for o, params in zip(curve.optimizers, groups, strict=True):
            by_key[o.loss].append(outputs[o.loss].item())
            grads = torch.autograd.grad(outputs[o.loss], params, retain_graph=True)
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
        for name, parameter in model.named_parameters():
            parameter.data.copy_(exact[name])
        for optimizer in optimizers:
            optimizer.step()
    return by_key


def parted(curve: Curve, torch: Any) -> dict[str, list[float]]:
    """Return how far losses of torch were off up to each step when its weights were moved."""
    right, near = torchs(curve, torch), [torchs(curve, torch, n) for n in range(NUM_MOVED)]
    return {
        key: np.maximum.accumulate(
            np.max([np.abs(np.subtract(n[key], losses)) for n in near], 0)
        ).tolist()
        for key, losses in right.items()
    }


def torch_name(curve: Curve, name: str) -> str:
    """Return what a parameter or buffer of ours is called in torch's model."""
    for our_part, part in curve.names:
        name = name.replace(our_part, part)
    return name


def check(
    curve: Curve,
    precision: str,
    expected: Mapping[str, Sequence[float]],
    apart: Mapping[str, Sequence[float]],
) -> None:
    """Hold the losses of a job against torch's, step by step."""
    for key, losses in ours(curve, precision).items():
        limit = TOLERANCE[precision] * (1 + np.abs(expected[key]))
        if precision == "float32":
            limit += PARTED * np.array(apart[key])
        off = np.abs(np.subtract(losses, expected[key]))
        where = f"{key} of {curve.name} in {precision}"
        assert (off <= limit).all(), f"{where}: {losses} is off by {off}, not {limit}"


def all_curves() -> list[Curve]:
    """Return the curves of all files of tests/oracle/models."""
    curves = []
    for file in sorted((FOLDER.parents[1] / "oracle" / "models").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"curves_of_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        curves += module.CURVES
    return curves


def stored(name: str) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return what is stored for a file of curves: of each `losses` and what they are `apart`."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(name: str, curves: Sequence[Curve], torch: Any) -> None:
    """Store the losses of torch for a file of curves."""
    FOLDER.mkdir(exist_ok=True)
    rows = []
    for curve in curves:
        losses, apart = torchs(curve, torch), parted(curve, torch)
        row = {"losses": _short(losses, 12), "apart": _short(apart, 2)}
        rows.append(f"{json.dumps(curve.name)}: {json.dumps(row)}")
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def _short(numbers: Mapping[str, Sequence[float]], digits: int) -> dict[str, list[float]]:
    return {key: [float(f"{x:.{digits}g}") for x in row] for key, row in numbers.items()}


def _wide(array: np.ndarray) -> np.ndarray:
    """Return an array as torch wants it: floats in float64, ids in int64."""
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
