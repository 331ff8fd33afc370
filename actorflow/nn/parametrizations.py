"""Weights that are computed from parameters: `nn.weight_norm` and `nn.spectral_norm`.

A parametrized layer keeps what the weight is computed from under `parametrizations.<name>`, with
torch's names. Its attribute `<name>` computes the weight each time that a job reads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import numpy as np

from actorflow import functional
from actorflow.nn.layers import ModuleDict, checked_extent
from actorflow.nn.module import Module
from actorflow.nn.parameter import Buffer, Parameter
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.op_math import in_float32, rounded, widened
from actorflow.tensor.tensor import Tensor, checked_axis
from actorflow.tensor.tracer import current_trace, find_source, require_trace
from compiler.contract.errors import CompileError

Array = np.ndarray[Any, Any]
M = TypeVar("M", bound=Module)

_FIRST_ITERATIONS = 15
"""Power iterations before the first step, as in torch."""

_NORMAL = (("kind", "normal"), ("std", 1.0))


def weight_norm(module: M, name: str = "weight", dim: int | None = 0) -> M:
    """Compute a weight of a layer as g v / |v|, in place; return the layer.

    Norms are over all axes but `dim`, or over all where it is None or -1. The parameters are
    `parametrizations.<name>.original0`, which is g and starts as the norms of the weight, and
    `original1`, which is v and was the weight until now. Follows
    torch.nn.utils.parametrizations.weight_norm. Source: Salimans & Kingma, 2016.

    Raises CompileError where the layer has no such parameter.
    """
    weight = _taken(module, name, "weight_norm")
    axis = None if dim is None or checked_size(dim, "dim") == -1 else checked_axis(weight, dim)
    return _parametrized(module, name, _WeightNorm(weight, axis))


def spectral_norm(
    module: M,
    name: str = "weight",
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    dim: int | None = None,
) -> M:
    """Compute a weight of a layer as itself divided by its largest singular value, in place.

    The value is estimated by power iterations, of which a job that trains does
    `n_power_iterations` each time that it reads the weight; their vectors are buffers. The weight
    is a matrix with the axis `dim` as its rows, 0 by default, and 1 for transposed convolutions.
    The parameter is `parametrizations.<name>.original`; the buffers `parametrizations.<name>.0._u`
    and `_v`. Follows torch.nn.utils.parametrizations.spectral_norm. Source: Miyato et al., 2018.

    Returns the layer. Raises CompileError where the layer has no such parameter.
    """
    weight = _taken(module, name, "spectral_norm")
    is_transposed = type(module).__name__.startswith("ConvTranspose")
    axis = checked_axis(weight, int(is_transposed) if dim is None else dim) if weight.ndim else 0
    count = checked_extent("spectral_norm", "n_power_iterations", n_power_iterations)
    small = checked_number(eps, "eps of spectral_norm")
    return _parametrized(module, name, _SpectralNorm(weight, axis, count, small))


def _taken(module: Module, name: str, what: str) -> Parameter:
    """Return a parameter of a layer. Raises CompileError where there is none of that name."""
    weight = vars(module).get(name) if isinstance(module, Module) else None
    if not isinstance(weight, Parameter) or not weight.ndim:
        names = [key for key, item in vars(module).items() if isinstance(item, Parameter)]
        raise CompileError(
            f"{find_source()}: {what} takes a layer and the name of a parameter of it that has an"
            f" axis, got {type(module).__name__} and {name!r}; its parameters are"
            f" {', '.join(names) or 'none'}"
        )
    return weight


def _parametrized(module: M, name: str, computed: Module) -> M:
    """Put a module in the place of a parameter, which the layer's attribute calls from now on."""
    delattr(module, name)
    if "parametrizations" not in vars(module):
        module.parametrizations = ModuleDict()  # type: ignore[attr-defined]  # as torch has it
    vars(module)["parametrizations"][name] = computed
    kind = type(module)
    # A class for this layer alone: others of the same class keep their parameter.
    module.__class__ = type(
        f"Parametrized{kind.__name__.removeprefix('Parametrized')}",
        (kind,),
        {
            name: property(partial(_computed, name=name)),
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,
        },
    )
    return module


def _computed(layer: Module, name: str) -> Any:
    require_trace(f"what computes {name} of a {type(layer).__name__}")
    return vars(layer)["parametrizations"][name]()


class _WeightNorm(Module):
    def __init__(self, weight: Parameter, dim: int | None) -> None:
        self.dim = dim
        shape = [n if axis == dim else 1 for axis, n in enumerate(weight.shape)]
        self.original0 = Parameter([] if dim is None else shape, dtype=weight.dtype)
        self.original0.is_frozen = weight.is_frozen
        self.original0.begin_from(weight, partial(_norms, dim=dim))
        self.original1 = weight

    def __call__(self) -> Tensor:
        """Return the weight."""
        return _rescaled(self.original1, self.original0, self.dim)


@in_float32
def _rescaled(v: Tensor, g: Tensor, dim: int | None) -> Tensor:
    """Return v with the norms g, of all axes but one or of all."""
    axes = [axis for axis in range(v.ndim) if axis != dim]
    if not axes:
        return v * (g / functional.abs(v))
    return v * (g / functional.norm(v, 2.0, axes, keepdim=dim is not None))


def _norms(weight: Array, dim: int | None) -> Array:
    axes = tuple([axis for axis in range(weight.ndim) if axis != dim])
    wide = weight.astype(np.float64)
    norms: Array = np.sqrt(np.square(wide).sum(axes, keepdims=dim is not None))
    return norms


class _SpectralNorm(Module):
    def __init__(self, weight: Parameter, dim: int, n_power_iterations: int, eps: float) -> None:
        self.dim, self.n_power_iterations, self.eps = dim, n_power_iterations, eps
        self.original = weight
        if weight.ndim > 1:
            vars(self)["0"] = _SingularVectors(weight, dim)

    def __call__(self) -> Tensor:
        """Return the weight."""
        weight = self.original
        if weight.ndim == 1:
            return functional.normalize(weight, dim=0, eps=self.eps)
        vectors: _SingularVectors = vars(self)["0"]
        matrix = _as_matrix(weight, self.dim).detach()
        u, v = vectors.next(widened(matrix), self.n_power_iterations, self.eps)
        return _over_singular_value(weight, u, v, self.dim)


def _as_matrix(weight: Tensor, dim: int) -> Tensor:
    return functional.movedim(weight, dim, 0).flatten(1)


@in_float32
def _over_singular_value(weight: Tensor, u: Tensor, v: Tensor, dim: int) -> Tensor:
    """Return a weight divided by the singular value of the vectors u, of its rows, and v."""
    return weight / functional.dot(u, _as_matrix(weight, dim) @ v)


class _SingularVectors(Module):
    """Estimates of the singular vectors of the largest value: `_u` of rows, `_v` of columns."""

    def __init__(self, weight: Parameter, dim: int) -> None:
        rows = weight.shape[dim]
        extents = {"_u": rows, "_v": weight.type.num_elements // max(rows, 1)}
        for name, extent in extents.items():
            buffer = Buffer((extent,), _NORMAL, dtype=weight.dtype)
            buffer.begin_from(weight, partial(_singular_vector, dim=dim, name=name))
            setattr(self, name, buffer)

    def next(self, matrix: Tensor, count: int, eps: float) -> tuple[Tensor, Tensor]:
        """Return the vectors, in a job that trains after so many iterations, which it keeps."""
        buffers: tuple[Buffer, Buffer] = vars(self)["_u"], vars(self)["_v"]
        trace = current_trace()
        if trace is None or not trace.is_training:
            return buffers
        v: Tensor = widened(buffers[1])
        for _ in range(count):
            u = functional.normalize(matrix @ v, dim=0, eps=eps)
            v = functional.normalize(matrix.T @ u, dim=0, eps=eps)
        u, v = rounded(u, buffers[0].dtype), rounded(v, buffers[1].dtype)
        buffers[0].assign(u)
        buffers[1].assign(v)
        return u, v


def _singular_vector(weight: Array, dim: int, name: str) -> Array:
    """Return a first estimate, always the same for the same weight."""
    matrix = np.moveaxis(weight.astype(np.float64), dim, 0).reshape(weight.shape[dim], -1)
    v = np.random.Generator(np.random.Philox(0)).standard_normal(matrix.shape[1])
    u = np.zeros(matrix.shape[0])
    for _ in range(_FIRST_ITERATIONS):
        u = _unit(matrix @ v)
        v = _unit(matrix.T @ u)
    return u if name == "_u" else v


def _unit(vector: Array) -> Array:
    unit: Array = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return unit
