"""What torch, where it is installed, or numpy makes of a call: dtype, shape, and values."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from actorflow import functional
from actorflow.functional import METHODS
from fuzzing.calls import Call, Fed

try:
    import torch
except ImportError:
    torch = None

UNLIKE = frozenset(("empty_like", "bernoulli", "multinomial", "normal", "uniform"))
"""Functions whose values are drawn, beside those that are called so."""


ANY_PLACE = frozenset(("topk", "kthvalue", "median", "sort", "argsort", "max", "min", "cummax"))
"""Functions that also say where: of several alike torch names any."""

Condition = Callable[[np.ndarray], bool]


def _is_whole(array: np.ndarray) -> bool:
    return array.dtype.kind in "iub"


def _is_extreme(array: np.ndarray) -> bool:
    """Whether numbers are not finite, or so large that their squares are not."""
    if array.dtype.kind != "f":
        return bool((np.abs(array.astype(np.float64)) > 1e9).any())
    largest = np.sqrt(np.float64(np.finfo(array.dtype).max)) / 8
    return not bool((np.abs(array.astype(np.float64)) < largest).all())


def _is_odd(array: np.ndarray) -> bool:
    return _is_whole(array) or _is_extreme(array)


def _is_any(array: np.ndarray) -> bool:
    return True


OTHERWISE: dict[str, tuple[Condition, str]] = {
    **dict.fromkeys(("all", "any"), (_is_whole, "bool; torch keeps uint8")),
    **dict.fromkeys(
        ("sum", "prod", "cumsum", "cumprod", "nansum"),
        (_is_odd, "uint64 stays; torch: int64; sums in another order overflow elsewhere"),
    ),
    **dict.fromkeys(
        ("relu6", "hardtanh", "threshold", "Hardtanh", "ReLU6", "Threshold"),
        (_is_whole, "of floats: integers are cast"),
    ),
    **dict.fromkeys(
        ("mish", "silu", "hardswish", "soft_margin_loss", "cosine_similarity", "pairwise_distance"),
        (_is_odd, "nothing overflows in between"),
    ),
    **dict.fromkeys(("fmod", "remainder", "__mod__"), (_is_odd, "nothing overflows in between")),
    "gelu": (_is_extreme, "limits at infinities; torch: NaN, of one number another than of two"),
    **dict.fromkeys(
        ("margin_ranking_loss", "hinge_embedding_loss"), (_is_whole, "of floats: integers are cast")
    ),
    **dict.fromkeys(("searchsorted", "bucketize"), (_is_any, "of what is not sorted anything")),
    **dict.fromkeys(
        (
            *("mean", "var", "std", "norm", "matmul", "__matmul__", "mm", "bmm", "mv", "dot"),
            *("addmm", "baddbmm", "einsum", "tensordot", "linear", "bilinear", "lerp", "cross"),
            *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
            *("group_norm", "layer_norm", "instance_norm", "batch_norm", "rms_norm", "normalize"),
            *("binary_cross_entropy_with_logits", "conv_transpose3d"),
        ),
        (_is_extreme, "sums in another order overflow elsewhere"),
    ),
    **dict.fromkeys(
        ("HuberLoss", "huber_loss"), (lambda array: array.dtype == "float16", "torch keeps float16")
    ),
    "pixel_unshuffle": (lambda array: not array.size, "torch leaves the shape of nothing"),
    "index_put": (_is_any, "of several values for one place torch takes any"),
    "Identity": (_is_any, "an array is handed back, which is no tensor"),
}
"""Functions that differ from torch where an argument is odd: which are, and how it is meant."""


def disagreement(call: Call, got: list[np.ndarray]) -> str:
    """Return in words where results differ from the oracle's; nothing where there is none."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            expected = _of_torch(call) if torch is not None else _of_numpy(call)
        except Exception:  # it refuses what we take: no oracle
            return ""
    is_odd = any([isinstance(a, str) for a in call.made_with[0]])  # whose place is another there
    if expected is None or is_odd or _is_otherwise(call):
        return ""
    if call.name in ANY_PLACE:
        expected, got = expected[:1], got[:1]
    if len(expected) != len(got):
        return f"number of results: {len(got)}, expected {len(expected)}"
    for array, other in zip(got, expected, strict=True):
        if array.shape != other.shape:
            return f"shape: {array.shape}, expected {other.shape}"
        if array.dtype != other.dtype:
            return f"dtype: {array.dtype}, expected {other.dtype}"
        if torch is not None and not _is_drawn(call) and (words := _values(array, other)):
            return words
    return ""


def _is_otherwise(call: Call) -> bool:
    condition, _ = OTHERWISE.get(call.name, (None, ""))
    arguments = [*call.args, *call.kwargs.values()]
    arrays = [a.array if isinstance(a, Fed) else np.asarray(a) for a in arguments if _is_array(a)]
    return condition is not None and any([condition(array) for array in arrays])


def _is_array(given: object) -> bool:
    return isinstance(given, (Fed, np.ndarray, int, float))


def _is_drawn(call: Call) -> bool:
    is_named_so = "rand" in call.name or "dropout" in call.name
    return call.name in UNLIKE or is_named_so or call.kind == "layer"


def _values(own: np.ndarray, other: np.ndarray) -> str:
    if own.dtype.kind != "f":
        count = int((own != other).sum())
        return f"values: {count} of {own.size} differ" if count else ""
    if (np.isnan(own) != np.isnan(other)).any():
        return f"values NaN: {int(np.isnan(own).sum())}, expected {int(np.isnan(other).sum())}"
    finite = np.isfinite(own) & np.isfinite(other)
    if (np.isinf(own) != np.isinf(other)).any():
        return f"values inf: {int(np.isinf(own).sum())}, expected {int(np.isinf(other).sum())}"
    wide, expected = own[finite].astype(np.float64), other[finite].astype(np.float64)
    bound = 3e-2 if own.dtype == np.float16 else 1e-3
    if wide.size and np.abs(wide - expected).max() > bound * max(1.0, np.abs(expected).max()):
        return f"values: off by {np.abs(wide - expected).max():.3g} of {np.abs(expected).max():.3g}"
    return ""


_SAME = (
    *("abs", "cos", "cosh", "exp", "expm1", "log", "log10", "log1p", "log2", "maximum", "minimum"),
    *("sin", "sinh", "sqrt", "square", "tan", "tanh", "floor", "ceil", "trunc", "isnan", "isinf"),
    *("isfinite", "logical_not", "logical_and", "logical_or"),
)


def _of_numpy(call: Call) -> list[np.ndarray] | None:
    """Return what numpy's function of the same name makes of floats of one dtype."""
    if call.kind != "function" or call.name not in _SAME or call.kwargs:
        return None
    if not all([isinstance(a, Fed) and a.array.dtype.kind == "f" for a in call.args]):
        return None
    arrays = [a.array for a in call.args]
    if len({a.dtype for a in arrays}) != 1:
        return None
    return [np.asarray(getattr(np, call.name)(*arrays))]


def _of_torch(call: Call) -> list[np.ndarray] | None:
    args = [_given(a) for a in call.args]
    kwargs = {k: _given(v) for k, v in call.kwargs.items()}
    if call.kind == "layer":
        positional, named = call.made_with
        layer = getattr(torch.nn, call.name)
        inspect.signature(layer).bind_partial(**named)
        module = layer(*[_given(a) for a in positional], **{k: _given(v) for k, v in named.items()})
        return [t.detach().numpy() for t in _listed(module(*args, **kwargs))]
    args, named = _by_name(call, args)
    if call.name in NO_DEFAULT and "dim" not in {**named, **kwargs}:
        return None  # torch chooses another one
    if call.kind == "method":
        y = getattr(args[0], call.name)(*args[1:], **named, **kwargs)
        if y is NotImplemented:  # Python then asks the other operand
            return None
    else:
        function = getattr(torch.nn.functional, call.name, None) or getattr(torch, call.name)
        y = function(*args, **named, **kwargs)
    return [t.detach().numpy() for t in _listed(y)]


NO_DEFAULT = ("softmax", "softmin", "log_softmax", "normalize")


def _by_name(call: Call, args: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return leading tensors, and all that comes after them under the names that we have."""
    function = METHODS.get(call.name) or getattr(functional, call.name, None)
    if function is None:
        return args, {}
    names = [p.name for p in inspect.signature(function).parameters.values()]
    names = names if call.kind == "function" else ["x", *names]
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
        return args, {}
    count = next((i for i, a in enumerate(args) if not isinstance(a, torch.Tensor)), len(args))
    count = max(count, 2 if names[1:2] in (["dim"], ["p"]) else 1)
    return args[:count], dict(zip(names[count:], args[count:], strict=False))


def _given(value: Any) -> Any:
    if isinstance(value, (Fed, np.ndarray)):
        return torch.tensor(value.array if isinstance(value, Fed) else value)
    if isinstance(value, (list, tuple)):
        return type(value)([_given(item) for item in value])
    if isinstance(value, dict):
        return {k: _given(v) for k, v in value.items()}
    return value


def _listed(made: Any) -> list[Any]:
    if isinstance(made, torch.Tensor):
        return [made]
    return [t for item in made for t in _listed(item)] if isinstance(made, (list, tuple)) else []
