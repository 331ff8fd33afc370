"""The layers every model is made of: linear, embeddings, dropouts, containers, convolutions.

Names, shapes and initialisers of parameters follow torch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

from actorflow import functional
from actorflow.functional import convolution
from actorflow.functional.convolution import Sizes, per_axis
from actorflow.functional.dense import padding_row
from actorflow.functional.random import checked_probability
from actorflow.nn.function_layers import FunctionLayer
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter, lay_out
from actorflow.tensor.layouts import LayerWords
from actorflow.tensor.literals import checked_number, checked_size
from actorflow.tensor.tensor import Tensor, integers
from actorflow.tensor.tracer import InitSpec, find_source
from compiler.contract.arrays import as_array
from compiler.contract.errors import CompileError
from compiler.contract.types import MOST_ELEMENTS

T = TypeVar("T")
M = TypeVar("M", bound=Module)


class Linear(Module):
    """y = x @ weight.T + bias, for x [..., in_features].

    `weight` [out, in] and `bias` [out] start uniform in +-1/sqrt(in).

    `sbp` says how they lie on the ranks of a job's mesh. `{"model": af.split(0)}` cuts the weight
    by columns of the result, and the bias with it; `{"model": af.split(1)}` by columns of x, so
    that results are sums over ranks, and the bias is whole. Or each by name:
    `{"weight": {"model": af.split(0)}, "bias": {}}`; what is not named is the compiler's to choose.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        sbp: LayerWords | None = None,
    ) -> None:
        in_features = checked_extent("Linear", "in_features", in_features)
        out_features = checked_extent("Linear", "out_features", out_features)
        bound = 1.0 / math.sqrt(in_features)
        init = (("kind", "uniform"), ("bound", bound))
        self.weight = Parameter((out_features, in_features), init)
        self.bias = Parameter((out_features,), init) if bias else None
        lay_out("Linear", sbp, weight=self.weight, bias=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out_features]."""
        return functional.linear(x, self.weight, self.bias)


class Bilinear(Module):
    """y[o] = x1 @ weight[o] @ x2 + bias[o], for x1 [..., in1_features] and x2 [..., in2_features].

    `weight` [out, in1, in2] and `bias` [out] start uniform in +-1/sqrt(in1).
    """

    def __init__(
        self, in1_features: int, in2_features: int, out_features: int, *, bias: bool = True
    ) -> None:
        in1_features = checked_extent("Bilinear", "in1_features", in1_features)
        in2_features = checked_extent("Bilinear", "in2_features", in2_features)
        out_features = checked_extent("Bilinear", "out_features", out_features)
        init = (("kind", "uniform"), ("bound", 1.0 / math.sqrt(in1_features)))
        self.weight = Parameter((out_features, in1_features, in2_features), init)
        self.bias = Parameter((out_features,), init) if bias else None

    def __call__(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Return [..., out_features]."""
        return functional.bilinear(input1, input2, self.weight, self.bias)


class Embedding(Module):
    """Rows of `weight` [num_embeddings, embedding_dim] by integer id.

    The weight starts normal with standard deviation `std`. The row `padding_idx` starts with zeros
    and gets no gradient. `sbp` says how it lies on the ranks of a job's mesh: by rows of the table,
    `{"model": af.split(0)}`, or by columns, `{"model": af.split(1)}`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        std: float = 1.0,
        sbp: LayerWords | None = None,
    ) -> None:
        self.weight, self.padding_idx = _table(
            type(self).__name__, num_embeddings, embedding_dim, padding_idx, std
        )
        lay_out("Embedding", sbp, weight=self.weight)

    def __call__(self, input: Tensor) -> Tensor:
        """Return input.shape + [embedding_dim]."""
        return functional.embedding(input, self.weight, self.padding_idx)


def _table(
    layer: str, rows: int, width: int, padding_idx: int | None, std: float
) -> tuple[Parameter, int | None]:
    """Return the weight of an embedding, and which row of it is padding."""
    rows = checked_extent(layer, "num_embeddings", rows)
    width = checked_extent(layer, "embedding_dim", width)
    std = checked_number(std, f"std of {layer}")
    if not std >= 0.0:
        raise CompileError(f"{find_source()}: std of {layer} must be 0 or more, got {std}")
    init: InitSpec = (("kind", "normal"), ("std", std))
    if padding_idx is not None:
        padding_idx = padding_row(padding_idx, rows)
        init = (*init, ("zero_row", padding_idx))
    return Parameter((rows, width), init), padding_idx


class EmbeddingBag(Module):
    """The sum, mean or largest of bags of rows of `weight`; see `functional.embedding_bag`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        std: float = 1.0,
    ) -> None:
        self.weight, self.padding_idx = _table(
            "EmbeddingBag", num_embeddings, embedding_dim, padding_idx, std
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    def __call__(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return [bags, embedding_dim]."""
        return functional.embedding_bag(
            input,
            self.weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


class Dropout(FunctionLayer, function=functional.dropout):
    """Zero elements with probability p during training; see `functional.dropout`."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(checked_probability(p))

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor of the same type as x."""
        return super().__call__(x)


class Dropout1d(Dropout, function=functional.dropout1d):
    """Zero whole channels of x [N, C, L]; see `functional.dropout1d`."""


class Dropout2d(Dropout, function=functional.dropout2d):
    """Zero whole channels of x [N, C, H, W]; see `functional.dropout2d`."""


class Dropout3d(Dropout, function=functional.dropout3d):
    """Zero whole channels of x [N, C, D, H, W]; see `functional.dropout3d`."""


class AlphaDropout(Dropout, function=functional.alpha_dropout):
    """Dropout between SELUs; see `functional.alpha_dropout`."""


MOST_LAYERS = 10_000
"""Of one module that makes them itself."""


def checked_extent(layer: str, name: str, extent: int, most: int = MOST_ELEMENTS) -> int:
    """Return an extent of a layer's parameters. Raises CompileError with the user's line."""
    size = checked_size(extent, f"{name} of {layer}")
    if not 1 <= size <= most:
        bound = "or more" if size < 1 else f"to {most:,}"
        raise CompileError(f"{find_source()}: {name} of {layer} must be 1 {bound}, got {size}")
    return size


class _ItemList(Module, Generic[T]):
    """What lists of modules and of parameters have in common; `_items` says what they hold."""

    _items: ClassVar[str]

    # Python would keep `ModuleList[Linear](...)` there, beside the items; it minds no refusal.
    __orig_class__ = property()

    def __init__(self, items: Iterable[T] = ()) -> None:
        self.extend(items)

    def _admitted(self, item: Any) -> T:
        """Return what is kept of an item. Raises CompileError."""
        raise NotImplementedError

    def append(self, item: T) -> Self:
        """Add an item at the end; return this list."""
        vars(self)[str(len(self))] = self._admitted(item)
        return self

    def extend(self, items: Iterable[T]) -> Self:
        """Add items at the end; return this list."""
        try:
            listed = list(items)
        except TypeError:
            raise CompileError(
                f"{find_source()}: {type(self).__name__} is made of a list of {self._items}, got"
                f" {type(items).__name__}"
            ) from None
        for item in listed:
            self.append(item)
        return self

    def __len__(self) -> int:
        return len(vars(self))

    def __iter__(self) -> Iterator[T]:
        return iter([*vars(self).values()])

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> T | Self:
        item = [*vars(self).values()][index]
        return type(self)(item) if isinstance(item, list) else item


class ModuleList(_ItemList[M]):
    """A list of modules; their paths are their numbers, `blocks.0`, as in a plain list."""

    _items = "modules"

    def _admitted(self, item: Any) -> M:
        if not isinstance(item, Module):
            raise CompileError(
                f"{find_source()}: {type(self).__name__} holds modules, got"
                f" {type(item).__name__}; for functions write a Module, or call them yourself"
            )
        return cast("M", item)


class ParameterList(_ItemList[Any]):
    """A list of parameters, and arrays, which become parameters; their paths are their numbers."""

    _items = "parameters"

    def _admitted(self, item: Any) -> Parameter:
        return _parameter("ParameterList", item)


def _parameter(holder: str, item: Any) -> Parameter:
    """Return a parameter as it is, and an array as one that begins with it."""
    if isinstance(item, Parameter):
        return item
    if as_array(item) is None:
        raise CompileError(
            f"{find_source()}: a {holder} holds parameters and arrays, got {type(item).__name__};"
            " for one that is drawn write nn.Parameter(shape, nn.init.normal_)"
        )
    return Parameter(item)


class Sequential(ModuleList[Module]):
    """Modules one after the other: each takes what the one before returned."""

    def __init__(self, *modules: Module | Sequence[Module]) -> None:
        is_list = len(modules) == 1 and isinstance(modules[0], list)
        listed: Any = modules[0] if is_list else modules
        super().__init__(listed)

    def __call__(self, x: Any) -> Tensor:
        """Return what the last module returns: a tensor, as far as types say."""
        for module in self:
            x = module(x)
        return cast("Tensor", x)


class _NamedItems(Module, Generic[T]):
    """What dicts of modules and of parameters have in common."""

    __orig_class__ = property()  # as of `_ItemList`

    def __init__(self, items: Mapping[str, T] | None = None) -> None:
        if not isinstance(items, Mapping | None):
            raise CompileError(
                f"{find_source()}: a {type(self).__name__} is made of a dict, got"
                f" {type(items).__name__}"
            )
        for name, item in (items or {}).items():
            self[name] = item

    def __setitem__(self, name: str, item: T) -> None:
        vars(self)[name] = item

    def __getitem__(self, name: str) -> T:
        return cast("T", vars(self)[name])

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter([*vars(self)])

    def __len__(self) -> int:
        return len(vars(self))

    def items(self) -> list[tuple[str, T]]:
        """Return names with what they stand for."""
        return [*vars(self).items()]


class ModuleDict(_NamedItems[M]):
    """Modules by name, in order."""

    def __setitem__(self, name: str, item: M) -> None:
        if not isinstance(name, str) or not isinstance(item, Module):
            raise CompileError(
                f"{find_source()}: a ModuleDict holds modules by text, got {name!r} and"
                f" {type(item).__name__}"
            )
        super().__setitem__(name, item)


class ParameterDict(_NamedItems[Any]):
    """Parameters by name, in order; arrays become parameters."""

    def __setitem__(self, name: str, item: Any) -> None:
        if not isinstance(name, str):
            raise CompileError(
                f"{find_source()}: a ParameterDict holds parameters by text, got {name!r}"
            )
        super().__setitem__(name, _parameter("ParameterDict", item))


class Identity(Module):
    """What comes, goes."""

    def __call__(self, x: T) -> T:
        """Return x."""
        return x


class Flatten(Module):
    """Make one axis of those from `start_dim` to `end_dim`; the batch stays."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same elements under another shape."""
        return functional.flatten(x, self.start_dim, self.end_dim)


class Unflatten(Module):
    """Make several axes of one."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim = dim
        self.unflattened_size = integers(unflattened_size, what="a size of Unflatten")

    def __call__(self, x: Tensor) -> Tensor:
        """Return the same elements under another shape."""
        return functional.unflatten(x, self.dim, self.unflattened_size)


class _Convolution(Module):
    """`weight` and `bias` start uniform in +-1 / sqrt(elements of one row of the weight)."""

    _rank = 0
    _is_transposed = False

    def __init_subclass__(cls, rank: int = 0, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._rank = rank or cls._rank  # of a class of the user's that of its base

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        name, rank = type(self).__name__, self._rank
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        channels, results, self.groups = [
            checked_size(n, f"{k} of {name}") for k, n in sizes.items()
        ]
        if (
            min(channels, results, self.groups) < 1
            or channels % self.groups
            or results % self.groups
        ):
            raise CompileError(
                f"{find_source()}: {name} needs channels of 1 or more that groups divide, got"
                f" {channels}, {results} and groups={self.groups}"
            )
        kernel = per_axis(kernel_size, rank, f"kernel_size of {name}")
        self.stride = per_axis(stride, rank, f"stride of {name}")
        self.dilation = per_axis(dilation, rank, f"dilation of {name}")
        self.padding = padding
        if not isinstance(padding, str):
            self.padding = per_axis(padding, rank, f"padding of {name}", least=0)
        rows, columns = (channels, results) if self._is_transposed else (results, channels)
        shape = (rows, columns // self.groups, *kernel)
        init = (("kind", "uniform"), ("bound", 1.0 / math.sqrt(math.prod(shape[1:]))))
        self.weight = Parameter(shape, init)
        self.bias = Parameter((results,), init) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, out_channels, *positions]."""
        ways = self.stride, self.padding, self.dilation, self.groups
        return convolution.convolved(self._rank, x, self.weight, self.bias, *ways)


class Conv1d(_Convolution, rank=1):
    """Convolve x [N, in_channels, L]; see `functional.conv1d`."""


class Conv2d(_Convolution, rank=2):
    """Convolve x [N, in_channels, H, W]; see `functional.conv2d`."""


class Conv3d(_Convolution, rank=3):
    """Convolve x [N, in_channels, D, H, W]; see `functional.conv3d`."""


class _Transposed(_Convolution):
    """The transposed convolution of a rank."""

    _is_transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        )
        self.output_padding = per_axis(output_padding, self._rank, "output_padding", least=0)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, out_channels, *spatial]."""
        ways: Any = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return convolution.transposed(self._rank, x, self.weight, self.bias, *ways)


class ConvTranspose1d(_Transposed, rank=1):
    """The transposed convolution of x [N, in_channels, L]; see `functional.conv_transpose1d`."""


class ConvTranspose2d(_Transposed, rank=2):
    """The transposed convolution of x [N, in_channels, H, W]."""


class ConvTranspose3d(_Transposed, rank=3):
    """The transposed convolution of x [N, in_channels, D, H, W]."""
