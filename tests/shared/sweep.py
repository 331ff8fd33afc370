"""Functions over the whole range of a type: their float64 results are the oracle.

The cases are those that tests/oracle holds against torch in float64. Here their arguments are
multiplied by sizes from the least to the largest of a narrower type, and a job in that type is held
against the job in float64, on the same numbers: no NaN and no infinity where the result fits, and
an error that the arguments' own last places explain.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import Case, listed, ours

from compiler.contract.types import rounded

ORACLE = Path(__file__).resolve().parents[1] / "oracle"

_WIDE = (1e-30, 1e-12, 1e-4, 1.0, 1e4, 1e12, 1e30)

SIZES = {"float16": (1e-6, 1e-3, 1.0, 40.0, 1e3, 2e4), "bfloat16": _WIDE, "float32": _WIDE}
"""What arguments of about 1 are multiplied by."""

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028234e38}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}

SEVERAL_DTYPES = ("operands of several dtypes", "known numbers")
"""Cases with results of other types than their arguments have."""

PERTURBED = 3
"""How often arguments are moved by a last place, to see what that does to results."""


def cases() -> Iterator[Case]:
    """Yield the cases of tests/oracle that have floats; the second of a name says its file."""
    names = set()
    for file in sorted(ORACLE.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"swept_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in getattr(module, "CASES", ()):
            if isinstance(case, Case) and any(a.dtype.kind == "f" for a in case.sets[0]):
                end = f" of {file.stem.removeprefix('test_')}" if case.name in names else ""
                names.add(case.name)
                yield replace(case, name=case.name + end)


def scaled(case: Case, dtype: str, sizes: Sequence[float]) -> list[tuple[np.ndarray, ...]]:
    """Return a case's first set that has elements, times each size, as numbers of a type."""
    first = next(
        (s for s in case.sets if all(a.size > 1 for a in s if a.dtype.kind == "f")), case.sets[0]
    )
    as_held = rounded if dtype == "bfloat16" else lambda a: a.astype(dtype)
    return [
        tuple(as_held(a * size).astype(np.float64) if a.dtype.kind == "f" else a for a in first)
        for size in sizes
    ]


def between_products(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function whose tensors come from products with 1, and go into such ones.

    In a job of precision "bf16" what lies between them is bfloat16 where the precision lets it.
    """
    one = np.ones((1, 1), np.float32)

    def through(tensor: Any) -> Any:
        if not tensor.dtype.is_float or 0 in tensor.shape:
            return tensor
        return (tensor.reshape(-1, 1) @ one).reshape(tensor.shape)

    return lambda *args: [through(t) for t in listed(function(*map(through, args)))]


def moved(sets: Sequence[tuple[np.ndarray, ...]], dtype: str) -> list[tuple[np.ndarray, ...]]:
    """Return arguments moved by up to a last place of their type, each a few times."""
    rng = np.random.default_rng(7)
    return [
        tuple(
            a * (1 + EPS[dtype] * rng.choice([-1.0, 1.0], a.shape)) if a.dtype.kind == "f" else a
            for a in arrays
        )
        for arrays in sets
        for _ in range(PERTURBED)
    ]


def faults(case: Case, dtype: str, sizes: Sequence[float], **options: Any) -> list[str]:
    """Return what is wrong with a case in a type: nothing, or a line for each result.

    `options` are those of the job in that type; the one in float64 has numpy's kernels.
    """
    sets = scaled(case, dtype, sizes)
    is_low = dtype == "bfloat16"
    options |= {"precision": "bf16"} if is_low else {}
    function = between_products(case.ours) if is_low else case.ours
    as_held = "float32" if is_low else dtype
    got = ours(replace(case, sets=sets, ours=function), as_held, **options)
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACTORFLOW_NATIVE", "0")
        wide = ours(replace(case, sets=[*sets, *moved(sets, dtype)]), "float64")
    lines = []
    for name, array in got.items():
        number, _, what = name.partition(".")
        want = wide[name].astype(np.float64)
        if array.dtype.kind != "f" or not array.size:
            continue
        if array.ndim and array.dtype != as_held and case.name not in SEVERAL_DTYPES:
            lines.append(f"{case.name} {what} of {dtype} is {array.dtype}")
        near = [wide[f"{len(sets) + int(number) * PERTURBED + i}.{what}"] for i in range(PERTURBED)]
        line = _fault(array.astype(np.float64), want, near, dtype)
        if line:
            lines.append(f"{case.name} {what} of {dtype} at {sizes[int(number)]:g}: {line}")
    return lines


def _fault(got: np.ndarray, want: np.ndarray, near: Sequence[np.ndarray], dtype: str) -> str | None:
    fits = np.isfinite(want) & (np.abs(want) < LARGEST[dtype] * (1 - 4 * EPS[dtype]))
    fits &= np.all([np.isfinite(n) & (np.abs(n) < LARGEST[dtype]) for n in near], 0)
    lost = fits & ~np.isfinite(got)
    if lost.any():
        place = tuple(np.argwhere(lost)[0].tolist())
        return f"{got[place]} at {list(place)}, where {want[place]:.6g} fits"
    spread = np.max([np.abs(n - want) for n in near], 0) if near else 0.0
    size = np.abs(np.where(fits, want, 0.0)).max(initial=0.0)
    limit = 16 * np.where(fits, spread, 0.0).max(initial=0.0) + 16 * EPS[dtype] * size
    error = np.where(fits, np.abs(got - want), 0.0)
    worst = float(error.max(initial=0.0))
    if worst > limit + 8 * LEAST[dtype]:
        place = tuple(np.unravel_index(int(error.argmax()), error.shape))
        return (
            f"{got[place]:.6g} for {want[place]:.6g}, {worst / (limit + LEAST[dtype]):.3g} limits"
        )
    return None
