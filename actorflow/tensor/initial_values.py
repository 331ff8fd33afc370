"""First values of variables: pure functions of (seed, name, type, spec), the same on every machine.

The generator is Philox (Salmon et al., SC 2011) keyed by the seed and a hash of the variable's
name, so the order in which a model creates its parameters does not matter, and a plan file can be
run without the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import PlainValue
from compiler.contract.errors import CompileError
from compiler.contract.host_arrays import aligned_empty
from compiler.contract.sbp import shard_slices
from compiler.contract.types import TensorType

if TYPE_CHECKING:
    from compiler.contract.plan import Plan
    from compiler.contract.plan_tables import Variable

Array = np.ndarray[Any, Any]

INITIALISERS = {
    **dict.fromkeys(("zeros", "ones", "seed", "given", "numbers")),
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
    """Return the type of the whole tensor that a variable is, or is a part of."""
    type_ = plan.views[variable.view].type
    return type_ if variable.sharding is None else TensorType(type_.dtype, variable.sharding.shape)


def initial_value(
    name: str,
    type_: TensorType,
    init: tuple[tuple[str, PlainValue], ...],
    seed: int,
    own: tuple[slice, ...] | None = None,
) -> Array:
    """Return the first value of a tensor of `type_`, or the part `own` of it, dense.

    Parts have the bits of the whole, so that ranks of any number begin alike. What is drawn takes
    the bytes of the part alone, and the time of the whole.

    Specs: kind "zeros", "ones", "seed" (the seed itself), "numbers" (0, 1, 2, ...), "constant" with
    value, "uniform" with bound, "normal" with std and perhaps a zero_row, "truncated_normal" with
    std, low and high, all three perhaps with a mean; "orthogonal" with gain, whose last bits are
    those of the machine's LAPACK; "dirac" with groups. See `actorflow.nn.init`. Raises CompileError
    for an unknown kind.
    """
    spec = dict(init)
    kind = spec.get("kind")
    dtype = type_.dtype.value
    own = tuple([slice(0, extent) for extent in type_.shape]) if own is None else own
    shape = tuple([rows.stop - rows.start for rows in own])
    if kind == "zeros":
        return np.zeros(shape, dtype)
    if kind == "ones":
        return np.ones(shape, dtype)
    if kind == "seed":
        return np.full(shape, seed, dtype)
    if kind == "constant":
        return np.full(shape, _number(spec, "value", name), dtype)
    if kind == "numbers":
        return np.arange(own[0].start, own[0].stop, dtype=dtype)
    if kind == "dirac":
        return np.ascontiguousarray(_dirac(type_, int(_number(spec, "groups", name)))[own])
    # A stream of its own for each name: adding a parameter changes the values of no other.
    generator = np.random.Generator(np.random.Philox(key=_key(seed, name)))
    mean = _number({"mean": 0.0, **spec}, "mean", name)
    if kind == "uniform":
        low, high = [mean + sign * _number(spec, "bound", name) for sign in (-1, 1)]
        return _drawn(type_, own, lambda count: generator.uniform(low, high, count))
    if kind == "normal":
        std = _number(spec, "std", name)
        values = _drawn(type_, own, lambda count: generator.standard_normal(count) * std + mean)
        if "zero_row" in spec:
            # range() takes a negative row as Python does, and refuses one that is not there.
            zero_row = range(type_.shape[0])[int(_number(spec, "zero_row", name))]
            if own[0].start <= zero_row < own[0].stop:
                values[zero_row - own[0].start] = 0.0
        return values
    if kind == "truncated_normal":
        std, *ends = [_number(spec, key, name) for key in ("std", "low", "high")]
        low, high = [(end - mean) / std for end in ends]
        return _drawn(
            type_, own, lambda count: _truncated(generator, count, low, high) * std + mean
        )
    if kind == "orthogonal":
        whole = _orthogonal(generator, type_, _number(spec, "gain", name))
        return np.ascontiguousarray(whole[own])
    if kind == "given":
        raise CompileError(
            f"{name!r} began with an array that the model has, and no initialiser: give this"
            " run the model's values"
        )
    raise CompileError(
        f"variable {name!r} has initialiser {kind!r}; known are {', '.join(INITIALISERS)}"
    )


def _drawn(type_: TensorType, own: tuple[slice, ...], draw: Callable[[int], Array]) -> Array:
    """Return the part `own` of numbers drawn a block at a time.

    Doubles for all of them at once would take four times the array's bytes, which malloc keeps.
    Each number follows from those before it, so what others have is drawn here, too, up to the
    part's end.
    """
    array = aligned_empty([rows.stop - rows.start for rows in own], type_.dtype.value)
    flat, filled = array.reshape(-1), 0
    for begin in range(0, type_.num_elements, _BLOCK_ELEMENTS):
        # The part ends before the whole does: what comes after it need not be drawn.
        if filled == flat.size:
            break
        count = min(_BLOCK_ELEMENTS, type_.num_elements - begin)
        block = draw(count)
        if flat.size < type_.num_elements:
            block = block[_is_own(type_.shape, own, begin, count)]
        # Row by row a part has its elements in the order of the whole.
        flat[filled : filled + block.size] = block
        filled += block.size
    return array


def _is_own(
    shape: tuple[int, ...], own: tuple[slice, ...], begin: int, count: int
) -> npt.NDArray[np.bool_]:
    """Return which of some elements of a whole, numbered row by row, a part has."""
    numbers = np.arange(begin, begin + count)
    is_own = np.ones(count, np.bool_)
    for extent, rows in zip(reversed(shape), reversed(own), strict=True):
        numbers, index = np.divmod(numbers, extent)
        is_own &= (index >= rows.start) & (index < rows.stop)
    return is_own


def _truncated(generator: np.random.Generator, count: int, low: float, high: float) -> Array:
    """Return standard normal numbers in [low, high]: such as fall outside are drawn again.

    Where nearly all would, they are uniform ones, kept as often as the density says.
    """
    # 0.2 is twice the share of a normal distribution: below a tenth inside, rejection draws too
    # often.
    is_wide = math.erf(high / math.sqrt(2.0)) - math.erf(low / math.sqrt(2.0)) > 0.2
    # The density is largest there, so the ratio below is at most 1.
    nearest = min(max(0.0, low), high)
    numbers = np.empty(0)
    while numbers.size < count:
        if is_wide:
            draws = generator.standard_normal(count)
            draws = draws[(draws >= low) & (draws <= high)]
        else:
            draws = generator.uniform(low, high, count)
            density = np.exp((nearest**2 - draws**2) / 2.0)
            draws = draws[generator.uniform(0.0, 1.0, count) < density]
        numbers = np.concatenate([numbers, draws])
    return numbers[:count]


def _orthogonal(generator: np.random.Generator, type_: TensorType, gain: float) -> Array:
    """Return a matrix of orthonormal rows, or columns where these are fewer (Saxe et al., 2014)."""
    rows = type_.shape[0]
    columns = math.prod(type_.shape[1:])
    matrix = generator.standard_normal((max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(matrix)
    q = q * np.where(np.diagonal(r) < 0, -1.0, 1.0)  # or it would not be uniform (Mezzadri, 2007)
    q = q.T if rows < columns else q
    return np.ascontiguousarray(q.reshape(type_.shape) * gain, type_.dtype.value)


def _dirac(type_: TensorType, groups: int) -> Array:
    """Return the weight of a convolution that hands channels on, in each group its first ones."""
    weight = np.zeros(type_.shape, type_.dtype.value)
    middle = [extent // 2 for extent in type_.shape[2:]]
    per_group = type_.shape[0] // groups
    for group in range(groups):
        for channel in range(min(per_group, type_.shape[1])):
            weight[(group * per_group + channel, channel, *middle)] = 1
    return weight


class InitialValues(Mapping[str, Array]):
    """First values of a plan's state, made when they are asked for and never kept.

    So an arena is filled one variable at a time, and no second copy of the state lives beside it.
    """

    __slots__ = ("_given", "_own", "_plan", "_rank", "_seed", "_variables")

    def __init__(
        self,
        plan: Plan,
        given: Mapping[str, Array],
        seed: int,
        rank: int | None,
        own: Mapping[str, Array],
    ) -> None:
        self._plan, self._own = plan, own
        self._given = given
        self._seed = seed
        self._rank = rank
        self._variables = {variable.name: variable for variable in plan.state}

    def __getitem__(self, name: str) -> Array:
        if name in self._own:
            return self._own[name]
        plan, variable = self._plan, self._variables[name]
        part, rank = variable.sharding, self._rank
        own = None if part is None or rank is None else shard_slices(part, plan.mesh, rank)
        if name not in self._given:
            return initial_value(name, whole_type(plan, variable), variable.init, self._seed, own)
        value = self._given[name]
        return value if own is None else np.ascontiguousarray(value[own])

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)


def initial_values(
    plan: Plan,
    given: Mapping[str, Array],
    seed: int,
    rank: int | None = 0,
    own: Mapping[str, Array] | None = None,
) -> Mapping[str, Array]:
    """Return a value for all state of one rank: its part of the given one, else of the first one.

    Given are whole tensors, by name; without a rank whole ones are returned, too. What is in `own`
    is the rank's part already, and comes before what is given. Raises CompileError for one of
    another type.
    """
    check_values(plan, given)
    return InitialValues(plan, given, seed, rank, own or {})


def check_values(plan: Plan, given: Mapping[str, Array]) -> None:
    """Raise CompileError for a value of another shape or dtype than its variable as a whole."""
    for variable in plan.state:
        type_ = whole_type(plan, variable)
        array = given.get(variable.name)
        if array is not None and (
            array.shape != type_.shape or str(array.dtype) != type_.dtype.value
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
    # Philox takes a key of two words of 64 bits; a negative seed wraps.
    return [seed & (2**64 - 1), int.from_bytes(digest, "little")]


def _number(spec: dict[str, PlainValue], key: str, name: str) -> float:
    value = spec.get(key)
    if not isinstance(value, (int, float)):
        raise CompileError(f"variable {name!r}: initialiser {spec.get('kind')!r} needs {key!r}")
    return float(value)
