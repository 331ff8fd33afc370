"""First values of variables: pure functions of (seed, name, type, spec), the same on every machine.

The generator is Philox (Salmon et al., SC 2011) keyed by the seed and a hash of the variable's
name, so the order in which a model creates its parameters does not matter, and a plan file can be
run without the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from actorflow.trace.tracer import find_source
from compiler.errors import CompileError
from compiler.plan import PlainValue, Plan, Variable
from compiler.types import TensorType

Array = np.ndarray[Any, Any]

INITIALISERS = {
    **dict.fromkeys(("zeros", "ones", "seed", "given")),
    "constant": "value",
    "uniform": "bound",
    "normal": "std",
    "truncated_normal": "std",
    "orthogonal": "gain",
    "dirac": "groups",
}
"""The kinds of initialisers, each with the number that it needs besides."""

_BLOCK_ELEMENTS = 1 << 16
"""Random numbers that are drawn at once."""


def whole_type(plan: Plan, variable: Variable) -> TensorType:
    """Return the type of the whole tensor that a variable is, or is a slice of."""
    type_ = plan.views[variable.view].type
    return type_ if variable.slice_of is None else TensorType(type_.dtype, variable.slice_of.shape)


def own_slice(plan: Plan, variable: Variable, whole: Array) -> Array:
    """Return what a variable is of the array of its whole tensor, dense."""
    if variable.slice_of is None:
        return whole
    index = variable.slice_of.index(plan.views[variable.view].type.shape)
    return np.ascontiguousarray(whole[index])


def initial_value(
    name: str, type_: TensorType, init: tuple[tuple[str, PlainValue], ...], seed: int
) -> Array:
    """Return the first value of a whole tensor, dense, of `type_`.

    Who has a slice takes it of this one, so that ranks of any number begin with the same bits.

    Specs: kind "zeros", "ones", "seed" (the seed itself), "constant" with value, "uniform" with
    bound, "normal" with std and perhaps a zero_row, "truncated_normal" with std, low and high, all
    three perhaps with a mean; "orthogonal" with gain, whose last bits are those of the machine's
    LAPACK; "dirac" with groups. See `actorflow.nn.init`. Raises CompileError for an unknown kind.
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
    if kind == "constant":
        return np.full(type_.shape, _number(spec, "value", name), dtype)
    if kind == "dirac":
        return _dirac(type_, int(_number(spec, "groups", name)))
    generator = np.random.Generator(np.random.Philox(key=_key(seed, name)))
    mean = _number({"mean": 0.0, **spec}, "mean", name)
    if kind == "uniform":
        bound = _number(spec, "bound", name)
        return _drawn(type_, lambda count: generator.uniform(mean - bound, mean + bound, count))
    if kind == "normal":
        std = _number(spec, "std", name)
        drawn = _drawn(type_, lambda count: generator.standard_normal(count) * std + mean)
        if "zero_row" in spec:
            drawn[int(_number(spec, "zero_row", name))] = 0.0
        return drawn
    if kind == "truncated_normal":
        std, *ends = [_number(spec, key, name) for key in ("std", "low", "high")]
        low, high = [(end - mean) / std for end in ends]
        return _drawn(type_, lambda count: _truncated(generator, count, low, high) * std + mean)
    if kind == "orthogonal":
        return _orthogonal(generator, type_, _number(spec, "gain", name))
    if kind == "given":
        raise CompileError(
            f"buffer {name!r} began with an array that the model has, and no initialiser: give this"
            " run the model's values"
        )
    raise CompileError(
        f"variable {name!r} has initialiser {kind!r}; known are {', '.join(INITIALISERS)}"
    )


def _drawn(type_: TensorType, draw: Callable[[int], Array]) -> Array:
    """Return numbers drawn a block at a time.

    Doubles for all of them at once would take four times the array's bytes, which malloc keeps.
    """
    array = np.empty(type_.num_elements, type_.dtype.value)
    for begin in range(0, array.size, _BLOCK_ELEMENTS):
        block = array[begin : begin + _BLOCK_ELEMENTS]
        block[...] = draw(block.size)
    return array.reshape(type_.shape)


def _truncated(generator: np.random.Generator, count: int, low: float, high: float) -> Array:
    """Return standard normal numbers in [low, high]: such as fall outside are drawn again.

    Where nearly all would, they are uniform ones, kept as often as the density says.
    """
    is_wide = math.erf(high / math.sqrt(2.0)) - math.erf(low / math.sqrt(2.0)) > 0.2
    nearest = min(max(0.0, low), high)
    found = np.empty(0)
    while found.size < count:
        if is_wide:
            drawn = generator.standard_normal(count)
            drawn = drawn[(drawn >= low) & (drawn <= high)]
        else:
            drawn = generator.uniform(low, high, count)
            kept = np.exp((nearest**2 - drawn**2) / 2.0)
            drawn = drawn[generator.uniform(0.0, 1.0, count) < kept]
        found = np.concatenate([found, drawn])
    return found[:count]


def _orthogonal(generator: np.random.Generator, type_: TensorType, gain: float) -> Array:
    """Return a matrix of orthonormal rows, or columns where these are fewer (Saxe et al., 2014)."""
    rows = type_.shape[0]
    columns = math.prod(type_.shape[1:])
    drawn = generator.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(drawn)
    q = q * np.where(np.diagonal(r) < 0, -1.0, 1.0)  # or it would not be uniform (Mezzadri, 2007)
    q = q.T if rows < columns else q
    return np.ascontiguousarray(q.reshape(type_.shape) * gain, type_.dtype.value)


def _dirac(type_: TensorType, groups: int) -> Array:
    """Return the weight of a convolution that hands channels on, in each group its first ones."""
    made = np.zeros(type_.shape, type_.dtype.value)
    middle = [extent // 2 for extent in type_.shape[2:]]
    own = type_.shape[0] // groups
    for group in range(groups):
        for channel in range(min(own, type_.shape[1])):
            made[(group * own + channel, channel, *middle)] = 1
    return made


class InitialValues(Mapping[str, Array]):
    """First values of a plan's state, made when they are asked for and never kept.

    So an arena is filled one variable at a time, and no second copy of the state lives beside it.
    """

    __slots__ = ("_given", "_plan", "_seed", "_variables")

    def __init__(self, plan: Plan, given: Mapping[str, Array], seed: int) -> None:
        self._plan = plan
        self._given = given
        self._seed = seed
        self._variables = {variable.name: variable for variable in plan.state}

    def __getitem__(self, name: str) -> Array:
        plan, variable = self._plan, self._variables[name]
        type_ = whole_type(plan, variable)
        if name not in self._given:
            return own_slice(plan, variable, initial_value(name, type_, variable.init, self._seed))
        value = self._given[name]
        return own_slice(plan, variable, value) if value.shape == type_.shape else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


def initial_values(plan: Plan, given: Mapping[str, Array], seed: int) -> Mapping[str, Array]:
    """Return a value for all state of the plan: the given one, else its initialiser's.

    A given one is the whole tensor, or the slice of it that the variable is. Raises CompileError
    for one of another type.
    """
    check_values(plan, given)
    return InitialValues(plan, given, seed)


def check_values(plan: Plan, given: Mapping[str, Array]) -> None:
    """Raise CompileError for a value of another shape or dtype than its variable in the plan."""
    for variable in plan.state:
        type_ = plan.views[variable.view].type
        array = given.get(variable.name)
        shapes = type_.shape, whole_type(plan, variable).shape
        if array is not None and (
            array.shape not in shapes or str(array.dtype) != type_.dtype.value
        ):
            raise CompileError(
                f"{find_source()}: variable {variable.name!r} is {type_} in plan {plan.name!r}, got"
                f" {array.dtype}{list(array.shape)}"
            )


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
