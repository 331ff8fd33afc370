"""Ops over the whole range of each float type: the operands, and torch's results of them.

`python tests/shared/whole_range.py` writes whole_range.npz with torch (2.13.0, on the CPU), and
tests/actors/kernels/host/test_whole_range.py reads both. Operands are float64 or float32 and cast
to the narrower types inside, here as there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

TABLE = Path(__file__).with_suffix(".npz")
DTYPES = ("float32", "float64", "bfloat16", "float16")
_LIMITS = {
    "float64": (5e-324, 2.3e-308, 1.7976931348623157e308),
    "float32": (1e-45, 1.2e-38, 3.4028234663852886e38),
    "bfloat16": (9.2e-41, 1.2e-38, 3.3895313892515355e38),
    "float16": (6e-8, 6.2e-5, 65504.0),
}

UNARY = (
    *("neg", "abs", "square", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos"),
    *("tanh", "sigmoid", "relu", "gelu", "silu", "gelu_exact", "log_sigmoid", "mish"),
    *("hardsigmoid", "hardswish", "exp2", "expm1", "log1p", "log2", "log10", "erf", "erfc"),
    *("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
)
BINARY = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum"),
    *("fmod", "remainder", "hypot", "logaddexp"),
)
ROWS = {
    "softmax": {"scale": 1.0, "causal": False},
    "layer_norm": {"eps": 1e-5},
    "cross_entropy_rows": {},
    "max": {"axes": (1,), "keepdims": False},
    "sum": {"axes": (1,), "keepdims": False},
    "mean": {"axes": (1,), "keepdims": False},
}
UPDATES = {
    "sgd_update": {"weight_decay": 0.1},
    "momentum_update": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "adamw_update": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
}
NAMES = (*UNARY, *BINARY, *ROWS)


def wide(dtype: str) -> str:
    """Return the dtype of the operands before they are cast."""
    return "float64" if dtype == "float64" else "float32"


def values(dtype: str) -> np.ndarray:
    """Return numbers of all sizes, both signs, and what is no number."""
    limits = _LIMITS[dtype]
    sizes = [*limits[:2], 0.5, 1.0, 3.0, 40.0, 1e4, 1e13, 1e18, 1e30, 1e300, limits[2]]
    sizes = [size for size in sizes if size <= limits[2]]
    both = [sign * size for size in sizes for sign in (1, -1)]
    return np.array([0.0, -0.0, *both, np.inf, -np.inf, np.nan]).astype(wide(dtype))


def operands(name: str, dtype: str) -> tuple[np.ndarray, ...]:
    """Return the float operands of an op: all numbers, all pairs, or rows that begin with a pair.

    Of an update they are parameter and gradient.
    """
    x = values(dtype)
    if name in UNARY:
        return (x,)
    a, b = (np.ascontiguousarray(v.reshape(-1)) for v in np.meshgrid(x, x))
    return (np.stack([a, b, np.full_like(a, 2.0)], 1),) if name in ROWS else (a, b)


def main() -> None:
    """Write torch's results, and its gradients of a sum of them."""
    table: dict[str, np.ndarray] = {}
    for dtype in DTYPES:
        for name in (*NAMES, *UPDATES):
            if name not in UPDATES or dtype in ("float32", "float64"):
                results = _updated(name, dtype) if name in UPDATES else _computed(name, dtype)
                table |= {f"{name}/{dtype}/{i}": y for i, y in enumerate(results)}
    np.savez_compressed(TABLE, **table)


def _computed(name: str, dtype: str) -> list[np.ndarray]:
    import torch

    functional = torch.nn.functional
    leaves = [torch.tensor(x, requires_grad=True) for x in operands(name, dtype)]
    x = [t.to(getattr(torch, dtype)) for t in leaves]
    functions = {
        "relu": functional.relu,
        "gelu": lambda t: functional.gelu(t, approximate="tanh"),
        "silu": functional.silu,
        "gelu_exact": functional.gelu,
        "log_sigmoid": functional.logsigmoid,
        **{n: getattr(functional, n) for n in ("mish", "hardsigmoid", "hardswish")},
        "softmax": lambda t: functional.softmax(t, 1),
        "layer_norm": lambda t: functional.layer_norm(t, (3,)),
        "cross_entropy_rows": lambda t: functional.cross_entropy(
            t, torch.ones(len(t), dtype=torch.int64), reduction="none"
        ),
        "max": lambda t: t.amax(1),
        "sum": lambda t: t.sum(1),
        "mean": lambda t: t.mean(1),
    }
    y = functions.get(name, getattr(torch, name, None))(*x)
    y.backward(torch.ones_like(y))
    return [t.detach().to(leaves[0].dtype).numpy() for t in (y, *[g.grad for g in leaves])]


def _updated(name: str, dtype: str) -> list[np.ndarray]:
    import torch

    attrs = dict(UPDATES[name])
    decay = attrs.pop("weight_decay")
    param, grad = (torch.tensor(x) for x in operands(name, dtype))
    parameter = torch.nn.Parameter(param)
    parameter.grad = grad
    if name == "adamw_update":
        betas = attrs["beta1"], attrs["beta2"]
        optimizer = torch.optim.AdamW([parameter], 0.1, betas, attrs["eps"], decay, foreach=False)
    else:
        momentum, nesterov = attrs.get("momentum", 0.0), attrs.get("nesterov", False)
        optimizer = torch.optim.SGD([parameter], 0.1, momentum, 0.0, decay, nesterov, foreach=False)
    optimizer.step()
    return [parameter.detach().numpy()]


if __name__ == "__main__":
    main()
