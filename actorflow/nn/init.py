"""How parameters begin: torch's `nn.init`, called in `__init__`.

    self.proj = nn.Linear(512, 512)
    nn.init.kaiming_normal_(self.proj.weight, nonlinearity="relu")
    nn.init.zeros_(self.proj.bias)

Nothing is drawn here: each function declares how a parameter begins. The first run draws, from its
seed and the parameter's path, so that a model needs no memory before, and begins alike on every
machine. Each returns the parameter, so it is an argument of a new one, too:
`nn.Parameter((3, 4), nn.init.orthogonal_)`. A parameter that has values already, loaded or trained,
is an error; write `parameter.data = array` for those.
"""

from __future__ import annotations

import math
from typing import TypeVar

from actorflow.nn.parameter import ModelTensor
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import PlainValue
from compiler.contract.errors import CompileError

__all__ = [
    "calculate_gain",
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]

T = TypeVar("T", bound=ModelTensor)

_GAINS = {
    **dict.fromkeys(("linear", "sigmoid"), 1.0),
    **{f"conv{way}{rank}d": 1.0 for way in ("", "_transpose") for rank in (1, 2, 3)},
    "tanh": 5.0 / 3.0,
    "relu": math.sqrt(2.0),
    "selu": 0.75,
}


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return what deviations are multiplied by before a nonlinearity; `param` is a slope."""
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else checked_number(param, "the slope of leaky_relu")
        return math.sqrt(2.0 / (1.0 + slope**2))
    if nonlinearity not in _GAINS:
        names = ", ".join([*_GAINS, "leaky_relu"])
        raise CompileError(
            f"{find_source()}: calculate_gain knows {names}, got {nonlinearity!r:.60}"
        )
    return _GAINS[nonlinearity]


def uniform_(tensor: T, a: float = 0.0, b: float = 1.0) -> T:
    """Let a parameter begin uniform in [a, b)."""
    low, high = checked_number(a, "a of uniform_"), checked_number(b, "b of uniform_")
    if not low <= high:
        raise CompileError(f"{find_source()}: uniform_ needs a <= b, got {a} and {b}")
    return _begins(tensor, "uniform", bound=(high - low) / 2.0, mean=(low + high) / 2.0)


def normal_(tensor: T, mean: float = 0.0, std: float = 1.0) -> T:
    """Let a parameter begin normal."""
    return _begins(tensor, "normal", std=_deviation(std), mean=checked_number(mean, "mean"))


def trunc_normal_(
    tensor: T, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> T:
    """Let a parameter begin normal, with what falls outside of [a, b] drawn again."""
    low, high = checked_number(a, "a of trunc_normal_"), checked_number(b, "b of trunc_normal_")
    if not (low < high and _deviation(std) > 0.0):
        raise CompileError(
            f"{find_source()}: trunc_normal_ needs a < b and a std above 0, got {a}, {b} and {std}"
        )
    centre = checked_number(mean, "mean")
    return _begins(tensor, "truncated_normal", std=float(std), low=low, high=high, mean=centre)


def constant_(tensor: T, val: float) -> T:
    """Let every element of a parameter begin as `val`."""
    return _begins(tensor, "constant", value=checked_number(val, "val of constant_"))


def zeros_(tensor: T) -> T:
    """Let a parameter begin at 0."""
    return _begins(tensor, "zeros")


def ones_(tensor: T) -> T:
    """Let a parameter begin at 1."""
    return _begins(tensor, "ones")


def eye_(tensor: T) -> T:
    """Let a matrix begin with ones on its diagonal."""
    if tensor.ndim != 2:
        raise CompileError(f"{find_source()}: eye_ needs a matrix, got {tensor.type}")
    return _begins(tensor, "dirac", groups=1)


def dirac_(tensor: T, groups: int = 1) -> T:
    """Let the weight of a convolution begin as one that hands its channels on."""
    parts = checked_size(groups, "groups of dirac_")
    if tensor.ndim not in (3, 4, 5) or parts < 1 or tensor.shape[0] % parts:
        raise CompileError(
            f"{find_source()}: dirac_ needs the weight of a convolution whose results groups"
            f" divide, got {tensor.type} and groups={groups}"
        )
    return _begins(tensor, "dirac", groups=parts)


def xavier_uniform_(tensor: T, gain: float = 1.0) -> T:
    """Let a weight begin uniform, of variance 2 gain^2 / (fan in + fan out) (Glorot, 2010)."""
    return _of_deviation(tensor, "uniform", _xavier("xavier_uniform_", tensor, gain))


def xavier_normal_(tensor: T, gain: float = 1.0) -> T:
    """Let a weight begin normal, of variance 2 gain^2 / (fan in + fan out) (Glorot, 2010)."""
    return _of_deviation(tensor, "normal", _xavier("xavier_normal_", tensor, gain))


def kaiming_uniform_(
    tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> T:
    """Let a weight begin uniform, of variance gain^2 / fan (He et al., 2015); see there."""
    return _of_deviation(tensor, "uniform", _kaiming(tensor, a, mode, nonlinearity))


def kaiming_normal_(
    tensor: T, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> T:
    """Let a weight begin normal, of variance gain^2 / fan (He et al., 2015).

    Args:
        tensor: the parameter, of two or more axes.
        a: the slope of the leaky ReLU that comes after.
        mode: "fan_in" keeps deviations on the way forward, "fan_out" those of gradients.
        nonlinearity: what comes after; see `calculate_gain`.
    """
    return _of_deviation(tensor, "normal", _kaiming(tensor, a, mode, nonlinearity))


def orthogonal_(tensor: T, gain: float = 1.0) -> T:
    """Let a weight, as a matrix of its first axis, begin orthogonal (Saxe et al., 2014)."""
    if tensor.ndim < 2:
        raise CompileError(f"{find_source()}: orthogonal_ needs two axes, got {tensor.type}")
    return _begins(tensor, "orthogonal", gain=checked_number(gain, "gain of orthogonal_"))


def _begins(tensor: T, kind: str, **numbers: PlainValue) -> T:
    if not isinstance(tensor, ModelTensor):
        raise CompileError(
            f"{find_source()}: nn.init is for parameters, got {type(tensor).__name__}; for an array"
            " of values write nn.Parameter(array)"
        )
    if tensor.data is not None:
        raise CompileError(
            f"{find_source()}: the {tensor.kind} made at {tensor.source} has values already, which"
            f" an initialiser would not change; write {tensor.kind}.data = array"
        )
    tensor.init = (("kind", kind), *numbers.items())
    return tensor


def _of_deviation(tensor: T, kind: str, std: float) -> T:
    if kind == "uniform":
        return _begins(tensor, kind, bound=math.sqrt(3.0) * std)
    return _begins(tensor, kind, std=std)


def _deviation(std: float) -> float:
    number = checked_number(std, "std")
    if not 0.0 <= number < math.inf:
        raise CompileError(f"{find_source()}: std must be finite and 0 or more, got {std}")
    return number


def _fans(what: str, tensor: T) -> tuple[int, int]:
    """Return how many numbers each result is made of, and each operand goes to."""
    if tensor.ndim < 2:
        raise CompileError(f"{find_source()}: {what} needs two axes or more, got {tensor.type}")
    window = math.prod(tensor.shape[2:])
    return tensor.shape[1] * window, tensor.shape[0] * window


def _xavier(what: str, tensor: T, gain: float) -> float:
    fan_in, fan_out = _fans(what, tensor)
    return checked_number(gain, f"gain of {what}") * math.sqrt(2.0 / max(fan_in + fan_out, 1))


def _kaiming(tensor: T, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise CompileError(f"{find_source()}: mode must be 'fan_in' or 'fan_out', got {mode!r:.60}")
    fan = _fans("an initialiser of He et al.", tensor)[mode == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(max(fan, 1))
