"""First values of variables: pure functions of (seed, name, type, spec), the same on every machine.

The generator is Philox (Salmon et al., SC 2011) keyed by the seed and a hash of the variable's
name, so the order in which a model creates its parameters does not matter, and a plan file can be
run without the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.errors import CompileError
from compiler.plan import PlainValue, Plan
from compiler.types import TensorType

Array = np.ndarray[Any, Any]


def initial_value(
    name: str, type_: TensorType, init: tuple[tuple[str, PlainValue], ...], seed: int
) -> Array:
    """Return the first value of a variable, dense, of `type_`.

    Specs: kind "zeros", "ones", "seed" (the seed itself), "uniform" with bound, "normal" with std.
    Raises CompileError for an unknown kind.
    """
    spec = dict(init)
    kind = spec.get("kind")
    dtype = type_.dtype.value
    if kind == "zeros":
        return np.zeros(type_.shape, dtype)
    if kind == "ones":
        return np.ones(type_.shape, dtype)
    if kind == "seed":
        return np.full(type_.shape, seed, dtype)
    generator = np.random.Generator(np.random.Philox(key=_key(seed, name)))
    if kind == "uniform":
        bound = _number(spec, "bound", name)
        return generator.uniform(-bound, bound, type_.shape).astype(dtype)
    if kind == "normal":
        return (generator.standard_normal(type_.shape) * _number(spec, "std", name)).astype(dtype)
    raise CompileError(
        f"variable {name!r} has initialiser {kind!r}; known are zeros, ones, seed, uniform, normal"
    )


def initial_values(plan: Plan, given: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Return a value for all state of the plan: the given one, else its initialiser's."""
    values: dict[str, Array] = {}
    for variable in plan.state:
        type_ = plan.views[variable.view].type
        array = given.get(variable.name)
        if array is None:
            array = initial_value(variable.name, type_, variable.init, seed)
        elif array.shape != type_.shape or str(array.dtype) != type_.dtype.value:
            raise CompileError(
                f"variable {variable.name!r} is {type_} in the plan, got"
                f" {array.dtype}{list(array.shape)}"
            )
        values[variable.name] = array
    return values


def steps_done(values: Mapping[str, Array]) -> int:
    """Return how many steps led to these values."""
    return int(values["step"]) if "step" in values else 0


def _key(seed: int, name: str) -> list[int]:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return [seed & (2**64 - 1), int.from_bytes(digest, "little")]


def _number(spec: dict[str, PlainValue], key: str, name: str) -> float:
    value = spec.get(key)
    if not isinstance(value, (int, float)):
        raise CompileError(f"variable {name!r}: initialiser {spec.get('kind')!r} needs {key!r}")
    return float(value)
