"""Calls of all that is public, with random arguments: one call from a name and a seed.

What there is to call is found by reflection: every function of `actorflow.functional`, every method
and operator of tensors, every layer. Arguments follow from the names and annotations of parameters.
Extents and sizes of one call come from few numbers, so that many calls fit together; in a part of
the calls an argument is anything at all.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actorflow import functional, nn
from actorflow.functional import METHODS
from actorflow.tensor.tensor import Tensor
from compiler.contract.types import DType

DTYPES = tuple([d.value for d in DType if d is not DType.BFLOAT16])
FLOATS = ("float32", "float64", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
PRIMES = (17, 67, 257, 1009)

HOSTILE = (
    *(None, True, False, 0, 1, -1, 2, -2, 3, 7, 64, 10**6, 2**40, 2**63, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, -1.5, 1e-45, 1e300, float("nan"), float("inf"), float("-inf"), 2.0, 3 + 4j),
    *("", "mean", "none", "x", "float32", "int8", "sim:9", b"x", (), [], {}, (1,), (2, 3), (0, 1)),
    *((1, 1, 1, 1), (-1,), (10**6, 10**6), (1.5, 2), ("a",), [[1, 2], [3]], {"a": 1}, slice(None)),
    *(Ellipsis, range(3), {1, 2}, np.float64(0.5), np.int8(-1), np.bool_(True), np.array("x")),
    *(np.zeros((2, 0)), np.arange(3), np.array(1j), np.array([None]), np.datetime64("2020"), len),
    *(object, int, np.float32, np.dtype("int16"), DType.INT32, DType.BFLOAT16),
)
"""What may come where anything else is expected."""

WORDS = {
    "reduction": ("mean", "sum", "none"),
    "padding": ("same", "valid"),
    "mode": ("constant", "reflect", "replicate", "circular", "nearest", "bilinear", "sum", "mean"),
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
    "approximate": ("none", "tanh"),
    "indexing": ("ij", "xy"),
    "equation": ("ij,jk->ik", "i,i->", "ij->ji", "...i,i->...", "ii->i", "ab,bc,cd", "i,j", ""),
    "p": ("fro", "nuc"),
}
"""Texts that parameters of a name take."""

OPERATORS = (
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__"),
    *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__matmul__", "__lt__", "__eq__"),
    *("__radd__", "__rsub__", "__rpow__", "__rtruediv__", "__neg__", "__invert__", "__getitem__"),
)


@dataclass(frozen=True)
class Fed:
    """An array that comes with the batch; other arrays are written in the function."""

    array: np.ndarray

    def __repr__(self) -> str:
        return f"{self.array.dtype}{list(self.array.shape)}"


@dataclass
class Call:
    """One call: what is called, with what, and what a layer is made with."""

    kind: str
    name: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    made_with: tuple[list[Any], dict[str, Any]] = ((), {})

    def __repr__(self) -> str:
        arguments = [f"{a!r:.120}" for a in self.args] + [
            f"{k}={v!r:.80}" for k, v in self.kwargs.items()
        ]
        if self.kind == "layer":
            args, kwargs = self.made_with
            settings = [f"{a!r:.80}" for a in args] + [f"{k}={v!r:.80}" for k, v in kwargs.items()]
            return f"nn.{self.name}({', '.join(settings)})({', '.join(arguments)})"
        return f"{'Tensor.' if self.kind == 'method' else ''}{self.name}({', '.join(arguments)})"


def subjects() -> list[tuple[str, str]]:
    """Return (kind, name) of all that can be called."""
    defined = [name for name in vars(Tensor) if callable(vars(Tensor)[name])]
    methods = [name for name in (*METHODS, *defined) if not name.startswith("_")]
    layers = [n for n, v in vars(nn).items() if isinstance(v, type) and issubclass(v, nn.Module)]
    return [
        *[("function", name) for name in functional.__all__],
        *[("method", name) for name in (*methods, *OPERATORS)],
        *[("layer", name) for name in layers if name != "Module"],
    ]


def drawn(kind: str, name: str, seed: int) -> Call:
    """Return the call of a seed."""
    return _Drawing(random.Random(f"{kind} {name} {seed}")).call(kind, name)


class _Drawing:
    """One call in the making: the numbers that its extents, dtypes and sizes are taken from."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        extent = rng.choice((1, 2, 3, 4, 5))
        self.extents = [extent] * 6 + [1]
        self.rank = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 4, 5))
        if rng.random() < 0.3:
            self.extents += [0, *range(6), rng.choice(PRIMES)]
        self.ranks = [self.rank] * 5 + ([*range(6)] if rng.random() < 0.4 else [])
        self.dtypes: tuple[str, ...] = ("float32",)
        chance = rng.random()
        if chance > 0.6:
            self.dtypes = (rng.choice(DTYPES),) if chance < 0.8 else DTYPES
        self.hostility = 0.0 if rng.random() < 0.6 else 0.35
        self.is_wild = rng.random() < 0.35  # values: not finite, extremes, ids out of range
        self.sizes = [extent] * 4 + [1, 1, 2, 0] + ([-1, 3, -2] if rng.random() < 0.4 else [])
        self.shape = tuple([rng.choice(self.extents) for _ in range(self.rank)])
        self.np = np.random.default_rng(rng.getrandbits(32))

    def call(self, kind: str, name: str) -> Call:
        if kind == "layer":
            layer = getattr(nn, name)
            layer_args = self.arguments(layer)
            if hasattr(layer, "_function"):  # which has the names of what it is called with
                parameters = inspect.signature(layer).parameters
                args, kwargs = self.arguments(layer._function, leaving_out=tuple(parameters))
            else:
                args, kwargs = self.arguments(layer.__call__, skips=1)
            if name in ("Sequential", "ModuleList", "ModuleDict"):
                return Call(kind, name, args or [self.fed()], kwargs, layer_args)
            return Call(kind, name, args, kwargs, layer_args)
        if kind == "function":
            return Call(kind, name, *self.arguments(getattr(functional, name)))
        function = METHODS.get(name) or vars(Tensor)[name]
        args, kwargs = self.arguments(function, skips=1)
        if name == "__getitem__":
            args = [self.index()]
        return Call(kind, name, [self.fed(), *args], kwargs)

    def arguments(
        self, function: Callable[..., Any], skips: int = 0, leaving_out: tuple[str, ...] = ()
    ) -> Any:
        args, kwargs = [], {}
        parameters = [*inspect.signature(function).parameters.values()][skips:]
        if getattr(function, "args", ()):  # a partial object
            parameters = [*inspect.signature(function.func).parameters.values()][2:]
        is_named = False
        for p in parameters:
            if p.name in leaving_out:
                continue
            if p.kind is p.VAR_POSITIONAL:
                count = self.rng.choice((0, 1, 1, 2, 3))
                args += [self.value(p.name, str(p.annotation)) for _ in range(count)]
            elif p.kind is p.VAR_KEYWORD:
                continue
            elif p.default is p.empty or self.rng.random() < 0.4:
                value = self.value(p.name, str(p.annotation))
                if is_named or p.kind is p.KEYWORD_ONLY or self.rng.random() < 0.1:
                    is_named = True
                    kwargs[p.name] = value
                else:
                    args.append(value)
            else:
                is_named = True
        if self.rng.random() < 0.01:
            args.append(self.rng.choice(HOSTILE))
        if self.rng.random() < 0.01:
            kwargs[self.rng.choice(("axis", "keepdims", "out", "dim", "inplace"))] = 1
        return args, kwargs

    def value(self, name: str, annotation: str) -> Any:
        rng = self.rng
        if rng.random() < self.hostility:
            return rng.choice(HOSTILE) if rng.random() < 0.8 else self.fed()
        if "None" in annotation and rng.random() < 0.3:
            return None
        if name == "dtype":
            return rng.choice((*DTYPES, np.float32, "float", None))
        if "Callable" in annotation:
            return rng.choice(_CONDITIONS if name == "cond_fun" else _FUNCTIONS)
        if "Sequence[Tensor]" in annotation or "Sequence[Index]" in annotation:
            shape = self.fed().array.shape
            return [self.fed(shape) for _ in range(rng.choice((1, 2, 2, 3)))]
        if "Index" in annotation or name in ("ids", "index", "indices"):
            return self.fed(dtypes=INTEGERS)
        if name in ("mask", "condition", "pred") or "mask" in name:
            return self.fed(dtypes=("bool", "float32"))
        if name in ("target", "labels"):
            is_class = self.rng.random() < 0.5
            shape = self.shape[:1] + self.shape[2:] if is_class else self.shape
            return self.fed(shape, INTEGERS if is_class else None)
        if any(word in annotation for word in ("Tensor", "Operand", "Any", "Tree", "Module")):
            return self.operand(annotation)
        if name in WORDS and ("str" in annotation) and rng.random() < 0.9:
            return rng.choice(WORDS[name])
        if any(word in annotation for word in ("Sizes", "Dims", "Shape", "Axes", "Sequence[int")):
            if "int" in annotation and "Sequence" in annotation and rng.random() < 0.4:
                return rng.choice(self.sizes)
            if rng.random() < 0.4:
                return rng.choice(self.sizes)
            sizes = [rng.choice(self.sizes) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))]
            return tuple(sizes) if rng.random() < 0.7 else sizes
        if annotation.startswith("bool"):
            return rng.random() < 0.5
        if annotation.startswith("float"):
            return rng.choice((0.0, 1.0, 0.1, 0.5, 2.0, 1e-5, 1, 2, -0.5, 1e30))
        if name.startswith("dim") or "axis" in name or name.endswith("_dim"):
            return rng.choice((0, 0, 1, -1, -1, 2, -2, 5))
        if annotation.startswith("int"):
            return rng.choice(self.sizes)
        if "str" in annotation:
            return rng.choice(("mean", "none", "x"))
        return self.operand(annotation)

    def operand(self, annotation: str) -> Any:
        chance = self.rng.random()
        if "Operand" in annotation and chance < 0.3:
            return self.rng.choice((0, 1, 2, -1, 3, 0.5, -2.0, True, 1e30, float("nan"), 255, 300))
        if "Tree" in annotation and chance < 0.4:
            return (self.fed(), {"a": self.fed()})
        return self.fed().array if chance < 0.05 else self.fed()

    def index(self) -> Any:
        def one() -> Any:
            bounds = (None, None, 0, 1, 2, -1, 5, -7)
            choices = (
                self.rng.choice(self.sizes),
                slice(*[self.rng.choice(bounds) for _ in range(3)]),
                None,
                Ellipsis,
                self.fed(dtypes=INTEGERS),
                self.fed(dtypes=("bool",)),
                self.rng.choice(HOSTILE),
                [0, 1],
            )
            return self.rng.choices(choices, (4, 4, 1, 1, 2, 0.5, 1, 0.5))[0]

        count = self.rng.choice((0, 1, 1, 2, 3))
        return one() if count == 0 else tuple([one() for _ in range(count)])

    def fed(self, shape: Any = None, dtypes: tuple[str, ...] | None = None) -> Fed:
        if shape is None:
            rank = self.rng.choice(self.ranks)
            shape = tuple([self.rng.choice(self.extents) for _ in range(rank)])
            if rank == self.rank and self.rng.random() < 0.7:
                shape = self.shape
        while np.prod(shape) > 20_000:
            shape = shape[1:]
        return Fed(np.asarray(self.filled(shape, self.rng.choice(dtypes or self.dtypes))))

    def filled(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if dtype == "bool":
            return self.np.random(shape) < 0.5
        if dtype in FLOATS:
            array = np.asarray(self.np.uniform(-2, 2, shape)).astype(dtype)
            if self.is_wild:
                info = np.finfo(dtype)
                odd = [np.nan, np.inf, -np.inf, 0, -0.0, info.max, info.min, info.tiny / 2, 1]
                odds = np.array(odd, dtype)[self.np.integers(0, len(odd), shape)]
                array = np.where(self.np.random(shape) < 0.3, odds, array)
            return array
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        if not self.is_wild:
            return np.asarray(self.np.integers(0, max(self.extents[0], 1), shape)).astype(dtype)
        odd = np.array([low, high, 0, 1, high // 2, 3], dtype)
        return odd[self.np.integers(0, len(odd), shape)]


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    lambda *a: a[0],
    lambda *a: a,
    lambda *a: (a[0], a[-1]),
    lambda *a: a[0] * 2,
    lambda *a: a[0] > 0,
    lambda *a: a[0].sum() > 0,
    lambda: None,
    lambda *a: None,
    lambda a, b: (a + b, b),
)

_CONDITIONS: tuple[Callable[..., Any], ...] = (
    lambda *a: functional.zeros(()) > 0,  # never: nobody stops a loop that has no end
    lambda *a: functional.zeros(()) > 0,
    lambda *a: functional.zeros(2) > 0,
    lambda *a: a,
    lambda: None,
)
