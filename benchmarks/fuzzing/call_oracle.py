"""What torch, where it is installed, or numpy makes of a call: dtype, shape, and values."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np

from actorflow import functional
from actorflow.functional.methods import METHODS
from fuzzing.calls import Call, Fed

try:
    import torch
except ImportError:
    torch = None

UNLIKE = frozenset(("dropout", "empty_like", "bernoulli", "multinomial", "normal", "uniform"))
"""Functions whose values are drawn."""


ANY_PLACE = frozenset(("topk", "kthvalue", "median", "sort", "argsort", "max", "min", "cummax"))
"""Functions that also say where: of several alike torch names any."""

OTHERWISE = {
    **dict.fromkeys(("all", "any"), "bool; torch keeps uint8"),
    **dict.fromkeys(("sum", "prod", "cumsum", "cumprod", "nansum"), "uint64 stays; torch: int64"),
    **dict.fromkeys(("relu6", "hardtanh", "threshold"), "of floats: integers are cast"),
    **dict.fromkeys(("Hardtanh", "ReLU6", "Threshold"), "of floats: integers are cast"),
    **dict.fromkeys(("mish", "silu", "soft_margin_loss"), "nothing overflows in between"),
    **dict.fromkeys(("cosine_similarity", "fmod", "remainder"), "nothing overflows in between"),
    "margin_ranking_loss": "whole numbers beyond their range",
    **dict.fromkeys(("searchsorted", "bucketize"), "of what is not sorted anything"),
}
"""Functions that differ from torch where the arguments are odd: how, looked at and meant so."""


def disagreement(call: Call, got: list[np.ndarray]) -> str:
    """Return in words where results differ from the oracle's; nothing where there is none."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            expected = _of_torch(call) if torch is not None else _of_numpy(call)
        except Exception:  # it refuses what we take: no oracle
            return ""
    given = [*call.args, *call.kwargs.values()]
    is_odd = any([a in ((), []) for a in given if isinstance(a, (tuple, list))])
    is_odd |= any([isinstance(a, str) for a in call.made_with[0]])  # whose place is another there
    if expected is None or call.name in OTHERWISE or is_odd:
        return ""
    if call.name in ANY_PLACE:
        expected, got = expected[:1], got[:1]
    if len(expected) != len(got):
        return f"number of results: {len(got)}, expected {len(expected)}"
    for own, other in zip(got, expected, strict=True):
        if own.shape != other.shape:
            return f"shape: {own.shape}, expected {other.shape}"
        if own.dtype != other.dtype:
            return f"dtype: {own.dtype}, expected {other.dtype}"
        if torch is not None and not _is_drawn(call) and (words := _values(own, other)):
            return words
    return ""


def _is_drawn(call: Call) -> bool:
    return call.name in UNLIKE or "rand" in call.name or call.kind == "layer"


def _values(own: np.ndarray, other: np.ndarray) -> str:
    if own.dtype.kind != "f":
        count = int((own != other).sum())
        return f"values: {count} of {own.size} differ" if count else ""
    if (np.isnan(own) != np.isnan(other)).any():
        return f"values NaN: {int(np.isnan(own).sum())}, expected {int(np.isnan(other).sum())}"
    finite = np.isfinite(own) & np.isfinite(other)
    if (np.isinf(own) != np.isinf(other)).any():
        return f"values inf: {int(np.isinf(own).sum())}, expected {int(np.isinf(other).sum())}"
    wide, known = own[finite].astype(np.float64), other[finite].astype(np.float64)
    bound = 3e-2 if own.dtype == np.float16 else 1e-3
    if wide.size and np.abs(wide - known).max() > bound * max(1.0, np.abs(known).max()):
        return f"values: off by {np.abs(wide - known).max():.3g} of {np.abs(known).max():.3g}"
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
        own, named = call.made_with
        layer = getattr(torch.nn, call.name)
        inspect.signature(layer).bind_partial(**named)
        made = layer(*[_given(a) for a in own], **{k: _given(v) for k, v in named.items()})
        return [t.detach().numpy() for t in _listed(made(*args, **kwargs))]
    args, named = _by_name(call, args)
    if call.name in NO_DEFAULT and "dim" not in {**named, **kwargs}:
        return None  # torch chooses another one
    if call.kind == "method":
        made = getattr(args[0], call.name)(*args[1:], **named, **kwargs)
    else:
        function = getattr(torch.nn.functional, call.name, None) or getattr(torch, call.name)
        made = function(*args, **named, **kwargs)
    return [t.detach().numpy() for t in _listed(made)]


NO_DEFAULT = ("softmax", "softmin", "log_softmax", "normalize", "cross")


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
