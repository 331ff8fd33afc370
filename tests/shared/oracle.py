"""Functions and layers of jobs against torch: values and gradients, as a user's job computes them.

A `Case` says a function once for us and once for torch, with argument sets for both. One job, in a
few steps, computes the outputs of all its argument sets and, by `af.grad`, the gradients of a
weighted sum of them. Torch computes the same in float64. What it computed is stored, two numbers a
tensor, so that tests need no torch: the sum of its elements times some fixed weights, and the sum
of the absolute terms, which is what an error is held against. One wrong element shows in it.

`--torch` computes anew, compares element by element, and stores what came; see `make oracle`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import actorflow as af
from actorflow import nn

FOLDER = Path(__file__).resolve().parents[1] / "data" / "oracle"

Arrays = tuple[np.ndarray, ...]

SHAPES = (
    *((), (1,), (5,), (0,), (3, 4), (1, 7), (4, 1), (33,), (2, 3, 4), (2, 0, 3)),
    *((1, 1, 1), (2, 1, 5), (16, 65), (129,), (3, 0), (2, 3, 1, 4), (8, 32), (1, 40), (40, 1)),
    (5, 3, 17),
)
"""Twenty shapes for functions of any shape: none, one and some elements along their axes."""

PAIRS = (
    *(((), ()), ((3,), ()), ((), (4,)), ((5,), (5,)), ((3, 4), (4,)), ((4,), (3, 4))),
    *(((3, 1), (1, 4)), ((2, 3, 4), (3, 1)), ((1,), (6,)), ((0,), (1,)), ((2, 0), (1,))),
    *(((2, 1, 5), (3, 1)), ((7, 1), (7, 9)), ((1, 1), (1, 1)), ((33,), (33,))),
    *(
        ((4, 1, 3), (2, 1)),
        ((16, 65), (65,)),
        ((16, 65), (16, 1)),
        ((5, 1), (0,)),
        ((2, 2), (2, 2)),
    ),
)
"""Twenty pairs of shapes that broadcast."""

FEWEST = 20
"""Argument sets of a case; of an optimizer each setting with each shape is one."""


@dataclass(frozen=True)
class Case:
    """A function of tensors, ours and torch's, and the arguments to try.

    `torchs` gets the module torch first. Floats among the arguments are differentiated, unless the
    function `has_gradient` not. `no_gpu`: why a GPU is left out.
    """

    name: str
    ours: Callable[..., Any]
    torchs: Callable[..., Any]
    sets: Sequence[Arrays]
    has_gradient: bool = True
    no_gpu: str = ""
    tolerance: float = 1e-5
    gradient_tolerance: float = 1e-4

    @property
    def num_sets(self) -> int:
        """Argument sets that are compared."""
        return len(self.sets)


def seeded(*what: object) -> np.random.Generator:
    """Return a generator that is the same in every process."""
    return np.random.default_rng(crc32(repr(what).encode()))


def floats(
    *shapes: tuple[int, ...], low: float = -3.0, high: float = 3.0, key: object = 0
) -> Arrays:
    """Return arrays of float64 in a range, far enough from one another to have no ties."""
    rng = seeded(shapes, low, high, key)
    return tuple([rng.uniform(low, high, shape) for shape in shapes])


def unary(low: float = -3.0, high: float = 3.0, shapes: Sequence[Any] = SHAPES) -> list[Arrays]:
    """Return argument sets of one tensor."""
    return [floats(shape, low=low, high=high, key=i) for i, shape in enumerate(shapes)]


def binary(low: float = -3.0, high: float = 3.0, pairs: Sequence[Any] = PAIRS) -> list[Arrays]:
    """Return argument sets of two tensors that broadcast."""
    return [floats(*pair, low=low, high=high, key=i) for i, pair in enumerate(pairs)]


def weights(shape: tuple[int, ...]) -> np.ndarray:
    """Return what elements are multiplied by in the sum that is compared and differentiated."""
    return seeded("weights", shape).uniform(0.5, 1.5, shape)


def turned(array: np.ndarray, number: int) -> tuple[np.ndarray, str]:
    """Return an array as a job is fed it, and how the job looks at it: odd strides are views."""
    way = ("plain", "turned", "sliced")[number % 3]
    if way == "turned" and array.ndim > 1:
        return np.ascontiguousarray(array.T), way
    if way == "sliced" and array.ndim and array.size:
        wide = np.full(
            (*array.shape[:-1], 2 * array.shape[-1]), np.nan if array.dtype.kind == "f" else 0
        )
        wide = wide.astype(array.dtype)
        wide[..., ::2] = array
        return wide, way
    return array, "plain"


def seen(tensor: Any, way: str) -> Any:
    """Look at what was fed as `turned` says."""
    if way == "turned":
        return tensor.permute(*range(len(tensor.shape))[::-1])
    return tensor[..., ::2] if way == "sliced" else tensor


def listed(made: Any) -> list[Any]:
    """Return the tensors of a result."""
    return list(made) if isinstance(made, (list, tuple)) else [made]


def ours(case: Case, dtype: str, **options: Any) -> dict[str, np.ndarray]:
    """Return the outputs and gradients of all argument sets, by name, as a job computes them.

    What is no function has a case of its own kind, with two methods that say so.
    """
    if not isinstance(case, Case):
        return case.ours(dtype)
    steps = rounds(case.sets)
    ways: dict[str, str] = {}

    def fed(numbers: Sequence[int]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for form, number in enumerate(numbers):
            for place, array in enumerate(case.sets[number]):
                typed = array.astype(dtype) if array.dtype.kind == "f" else array
                key = f"{form}.{place}"
                arrays[key], ways[key] = turned(np.asarray(typed), form + place)
        return arrays

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = {}
        for form, number in enumerate(steps[0]):
            keys = [f"{form}.{place}" for place in range(len(case.sets[number]))]
            args = [seen(batch[key], ways[key]) for key in keys]
            tensors = listed(case.ours(*args))
            outputs |= {f"{form}.out{i}": tensor for i, tensor in enumerate(tensors)}
            indices = [i for i, t in enumerate(args) if t.dtype.is_float]
            flows = [t for t in tensors if t.dtype.is_float]
            if not (case.has_gradient and indices and flows):
                continue
            total = None
            for tensor in flows:
                weight = weights(tensor.shape).astype(dtype)
                term = (tensor.to(dtype) * weight).sum()
                total = term if total is None else total + term
            grads = af.grad(total, [args[i] for i in indices], allow_unused=True)
            outputs |= {
                f"{form}.grad{i}": grad
                for i, grad in zip(indices, grads, strict=True)
                if grad is not None
            }
        return outputs

    job = af.job(train=False, **options)(compute)
    model = nn.Module()
    results = {}
    try:
        for numbers in steps:
            for name, value in job.step(model, fed(numbers)).items():
                form, _, what = name.partition(".")
                results[f"{numbers[int(form)]}.{what}"] = np.asarray(value)
    finally:
        job.close(model)
    return results


def rounds(sets: Sequence[Arrays]) -> list[list[int]]:
    """Return numbers of argument sets, in each step of a job one of each form.

    Sets of the same shapes and dtypes are one form: its plan is made once, however many there are.
    A form of fewer sets than others comes again with its last.
    """
    forms: dict[Any, list[int]] = {}
    for number, arrays in enumerate(sets):
        forms.setdefault(tuple([(a.shape, a.dtype.str) for a in arrays]), []).append(number)
    most = max(map(len, forms.values()))
    return [[of[min(step, len(of) - 1)] for of in forms.values()] for step in range(most)]


def torchs(case: Case, torch: Any) -> dict[str, np.ndarray]:
    """Return the same by torch, floats in float64."""
    if not isinstance(case, Case):
        return case.torchs(torch)
    outputs = {}
    for number, arrays in enumerate(case.sets):
        args = [torch.tensor(a) for a in arrays]
        indices = [i for i, t in enumerate(args) if t.dtype.is_floating_point]
        for i in indices:
            args[i].requires_grad_(case.has_gradient)
        with warnings.catch_warnings():  # what torch advises on speed, or says of its own history
            warnings.simplefilter("ignore", UserWarning)
            tensors = listed(case.torchs(torch, *args))
        outputs |= {f"{number}.out{i}": t.detach().numpy() for i, t in enumerate(tensors)}
        flows = [t for t in tensors if t.dtype.is_floating_point and t.requires_grad]
        if not (case.has_gradient and indices and flows):
            continue
        total = sum([(t * torch.tensor(weights(tuple(t.shape)))).sum() for t in flows])
        grads = torch.autograd.grad(total, [args[i] for i in indices], allow_unused=True)
        for i, grad in zip(indices, grads, strict=True):
            outputs[f"{number}.grad{i}"] = (
                torch.zeros_like(args[i]) if grad is None else grad
            ).numpy()
    return outputs


def projected(array: np.ndarray) -> list[float]:
    """Return the two numbers that are stored of a tensor, and what is not finite of it."""
    wide = np.asarray(array, np.float64)
    weight = seeded("projection", wide.shape).uniform(0.5, 1.5, wide.shape)
    finite = np.where(np.isfinite(wide), wide, 0.0) * weight
    odd = [int(np.isnan(wide).sum()), int((wide == np.inf).sum()), int((wide == -np.inf).sum())]
    sums = [float(f"{s:.14g}") for s in (finite.sum(), np.abs(finite).sum())]
    return [*sums, *(odd if any(odd) else ())]


def check(case: Case, dtype: str, expected: dict[str, list[float]]) -> None:
    """Hold what a job computes against what is stored of torch."""
    got = ours(case, dtype)
    for name, (total, size, *odd) in expected.items():
        if name not in got:
            assert size == 0.0, f"{case.name}: {name} has no gradient here, and one in torch"
            continue
        own_total, own_size, *own_odd = projected(got[name])
        limit = _tolerance(case, name, dtype) * max(size, own_size, 1e-3)
        where = f"{case.name} {name} in {dtype}"
        assert own_odd == odd, f"{where}: {own_odd} NaN, inf, -inf; torch has {odd}"
        assert abs(own_total - total) <= limit, f"{where}: {own_total}, torch has {total}"


def compare(case: Case, dtype: str, expected: dict[str, np.ndarray]) -> None:
    """Hold what a job computes against torch's own arrays, element by element."""
    got = ours(case, dtype)
    for name, array in expected.items():
        if name not in got:
            assert not array.any(), f"{case.name}: {name} has no gradient here, and one in torch"
            continue
        where = f"{case.name} {name} in {dtype}"
        assert got[name].shape == array.shape, f"{where}: {got[name].shape}, torch {array.shape}"
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(got[name], array, err_msg=where)
            continue
        finite = np.abs(array[np.isfinite(array)])
        scale = float(finite.max()) if finite.size else 1.0
        bound = _tolerance(case, name, dtype)
        np.testing.assert_allclose(got[name], array, rtol=bound, atol=bound * scale, err_msg=where)


def _tolerance(case: Case, name: str, dtype: str) -> float:
    if dtype == "float64":
        return max(1e-10, case.tolerance if case.tolerance > 1e-3 else 0.0)
    return case.gradient_tolerance if ".grad" in name else case.tolerance


def check_stored(known: dict[str, list[float]], expected: dict[str, np.ndarray]) -> None:
    """Hold what is stored against what torch computes now."""
    assert known.keys() == expected.keys(), "other arguments are stored: make oracle-store"
    for name, array in expected.items():
        total, size, *odd = projected(array)
        assert [size, *odd] == pytest.approx([*known[name][1:]], 1e-9), f"{name}: make oracle-store"
        assert abs(total - known[name][0]) <= 1e-9 * size, f"{name}: make oracle-store"


def stored(name: str) -> dict[str, dict[str, list[float]]]:
    """Return what is stored for a file of cases."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(name: str, cases: Sequence[Case], torch: Any) -> None:
    """Store what torch computes for a file of cases."""
    FOLDER.mkdir(exist_ok=True)
    rows = [
        f"{json.dumps(case.name)}: "
        + json.dumps({key: projected(a) for key, a in torchs(case, torch).items()})
        for case in cases
    ]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
