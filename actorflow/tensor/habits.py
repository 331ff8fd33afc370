"""Calls as users of torch write them: what is clear is done, and all else is told what to write.

An argument that torch has and a function here has not would end in Python's TypeError, which does
not say what there is in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from actorflow.tensor.arguments import parameters_of
from actorflow.tensor.tensor import as_tensor, unsupported_attribute
from actorflow.tensor.tracer import find_source
from compiler.contract.errors import CompileError

F = TypeVar("F", bound=Callable[..., Any])

ARGUMENT_HINTS = {
    "training": "dropout follows the job: it drops in a job that trains, and not in one of"
    " @af.job(train=False)",
    **dict.fromkeys(("inplace", "out"), "tensors never change: leave it out, and use the result"),
    "device": "say of the job where it runs: @af.job(device='cuda')",
    "requires_grad": "parameters of the model are trained, and freeze() excludes them;"
    " af.grad(y, x) has the gradient of any tensor",
    "generator": "random numbers follow from the seed of the job: @af.job(seed=0)",
    "dtype": "cast the operands by x.to(dtype)",
    **dict.fromkeys(("size_average", "reduce"), "write reduction='mean', 'sum' or 'none'"),
    **dict.fromkeys(("non_blocking", "memory_format", "layout", "pin_memory"), "leave it out: the"
    " compiler decides where and how tensors lie"),
}  # fmt: skip
"""Arguments of torch's functions and layers -> what to write in their place."""

_SCHEDULE = "a schedule is given to the optimizer as lr=, and steps by itself: "
OPTIM_HINTS = {
    "lr_scheduler": _SCHEDULE + "af.optim.cosine, one_cycle, warmup, step, or a function",
    **{
        torchs: f"{_SCHEDULE}af.optim.{ours}"
        for torchs, ours in {
            "StepLR": "step", "MultiStepLR": "multi_step", "ExponentialLR": "exponential",
            "CosineAnnealingLR": "cosine", "CosineAnnealingWarmRestarts": "cosine_restarts",
            "OneCycleLR": "one_cycle", "LinearLR": "linear", "PolynomialLR": "polynomial",
            "ConstantLR": "constant", "SequentialLR": "chain",
        }.items()
    },
    "LambdaLR": _SCHEDULE + "a function of the step",
    "swa_utils": "@af.job(ema=0.999) keeps an average of the weights",
}  # fmt: skip
"""Names of torch.optim -> what to write in their place."""

_DTYPE_OF_A_LAYER = (
    "its parameters are float32; model.load(model.state(), dtype='float64') changes that, and"
    " @af.job(precision='bf16') the dtype of the computation"
)

_CAST_FIRST = frozenset(
    ("sum", "nansum", "mean", "nanmean", "prod", "cumsum", "cumprod", "softmax", "log_softmax",
     "softmin")
)  # fmt: skip
"""Functions of which torch's take a dtype, which their operand is cast to before."""

_BY_PLACE = ("keepdim", "bias")
"""Arguments that torch takes by place, too, and that are given by name here."""


def hinting(module: str, instead: dict[str, str]) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a module, which says what there is in place of torch's names."""

    def missing(name: str) -> NoReturn:
        raise unsupported_attribute(f"module {module!r}", name, instead)

    return missing


def hints(names: Iterable[str]) -> str:
    """Return what to write in place of those arguments that are torch's; nothing for others."""
    return "".join(
        [f"; {name}: {ARGUMENT_HINTS[name]}" for name in names if name in ARGUMENT_HINTS]
    )


def accept_habits(function: F) -> F:
    """Let a function be called as torch's is, where that is clear; else say what to write.

    `unbiased=` is `correction=`, `input=` the first argument, `dtype=` of a sum or softmax a cast
    before it, and a last True or False by place `keepdim` or `bias`. Raises CompileError for what
    is in `ARGUMENT_HINTS`; wrong calls of other kinds are Python's to refuse.
    """
    parameters = parameters_of(function)
    if parameters.takes_any_name:
        return function
    by_place, by_name, rest = parameters.by_place, parameters.by_name, parameters.rest
    known = {*by_place, *by_name, *[rest] * bool(rest)}

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > len(by_place) and not rest:
            args = _by_name(function, args, kwargs, by_place, by_name)
        if not kwargs.keys() <= known:
            args = _translated(function, args, kwargs, known, by_place[:1])
        return function(*args, **kwargs)

    return called  # type: ignore[return-value]  # of the same signature


def _by_name(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    places: Sequence[str],
    by_name: Sequence[str],
) -> tuple[Any, ...]:
    """Move what is beyond the places to the arguments that torch has there."""
    rest = args[len(places) :]
    if function.__name__.endswith("dropout"):
        raise _refusal(function, "training")
    targets = [name for name in by_name if name in _BY_PLACE][:1]
    if "correction" in by_name:
        targets = ["unbiased", *targets]
    is_clear = len(rest) <= len(targets) and all([isinstance(value, bool) for value in rest])
    if not is_clear or any([name in kwargs for name in targets[: len(rest)]]):
        return args
    kwargs.update(zip(targets, rest, strict=False))
    return args[: len(places)]


def _translated(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Collection[str],
    first: Sequence[str],
) -> tuple[Any, ...]:
    """Change arguments of torch into those of a function."""
    if "unbiased" in kwargs and "correction" in known and "correction" not in kwargs:
        kwargs["correction"] = int(bool(kwargs.pop("unbiased")))
    if "input" in kwargs and "input" not in known and not args and first and first[0] not in kwargs:
        args = (kwargs.pop("input"),)
    if "dtype" in kwargs and function.__name__ in _CAST_FIRST and args:
        dtype = kwargs.pop("dtype")
        args = (as_tensor(args[0]) if dtype is None else as_tensor(args[0]).to(dtype), *args[1:])
    for name in kwargs:
        if name in ARGUMENT_HINTS and name not in known:
            raise _refusal(function, name)
    return args


def _refusal(function: Callable[..., Any], name: str) -> CompileError:
    is_layer = function.__name__ == "__init__"
    of = function.__qualname__.removesuffix(".__call__").removesuffix(".__init__")
    hint = _DTYPE_OF_A_LAYER if is_layer and name == "dtype" else ARGUMENT_HINTS[name]
    return CompileError(f"{find_source()}: {of} takes no {name}=; {hint}")
