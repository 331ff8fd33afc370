"""Looking inside a job: `af.debug.print`, `check` and `breakpoint` of tensors.

    af.debug.print("scores {} of mean {:.3f}", scores, scores.mean())
    af.debug.check(scores)
    af.debug.check(scores, lambda array: array.max() < 1e4)
    af.debug.breakpoint(scores)

They are outputs of the plan (`compiler.contract.probe`), so nothing removes them, and the numbers
that a step computes are those without them. They happen when the step's outputs reach the host, in
the order in which they were written, once for each batch and each iteration of an `af.scan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from actorflow.tensor.probes import CheckFailed, Predicate, check_format
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import Trace, current_trace, find_source
from compiler.contract.errors import CompileError
from compiler.contract.probe import ProbeKind
from compiler.contract.types import DType

__all__ = ["CheckFailed", "breakpoint", "check", "print"]


def print(text: str, *values: object) -> None:  # noqa: A001  # as jax.debug.print
    """Print tensors by a format of `str.format`, when the step has computed them.

    Scalars are numbers, so that `{:.3f}` applies; other tensors are numpy's arrays. Of several
    ranks each prints, with its number, the whole tensor. Raises CompileError, with the user's line,
    for a format that does not fit, and outside of a job.
    """
    trace = _tracing("print")
    if not isinstance(text, str):
        raise CompileError(
            f"{find_source()}: af.debug.print takes a format first, as in"
            f" af.debug.print('x {{}}', x); got {_described(text)}"
        )
    tensors = _tensors(values, "print")
    check_format(text, [tensor.type for tensor in tensors], find_source())
    _emit(trace, ProbeKind.PRINT, text, tensors)


def check(value: object, predicate: Predicate | None = None) -> None:
    """End the run with a `CheckFailed` where a tensor is not finite, or a predicate does not hold.

    `predicate` gets an array of numpy and returns a bool. It is the user's code, so a plan that was
    loaded from a file does not have it: a line of the log says that its check is left out. Raises
    CompileError, with the user's line, outside of a job, and for integers without a predicate,
    which are always finite.
    """
    trace = _tracing("check")
    (tensor,) = _tensors([value], "check")
    if predicate is None and not tensor.dtype.is_float:
        raise CompileError(
            f"{find_source()}: af.debug.check wants finite numbers, and {tensor.type} has no"
            " others; give a predicate, as in af.debug.check(x, lambda array: array.min() >= 0)"
        )
    if predicate is not None and not callable(predicate):
        raise CompileError(
            f"{find_source()}: the predicate of af.debug.check is a function of an array, got"
            f" {_described(predicate)}"
        )
    name = getattr(predicate, "__qualname__", type(predicate).__qualname__)
    text = "" if predicate is None else name
    _emit(trace, ProbeKind.CHECK, text, [tensor], predicate)


def breakpoint(*values: object) -> None:  # noqa: A001  # Python's own stops here
    """Stop in Python's debugger when the step has computed some tensors: `values` are the arrays.

    The run waits meanwhile. PYTHONBREAKPOINT names another debugger, as for Python's own function.
    Raises CompileError, with the user's line, outside of a job.
    """
    _emit(_tracing("breakpoint"), ProbeKind.BREAK, "", _tensors(values, "breakpoint"))


def _tracing(name: str) -> Trace:
    trace = current_trace()
    if trace is None:
        raise CompileError(
            f"{find_source()}: af.debug.{name} was called outside of a job; call it inside a"
            " function decorated with @af.job, or in eager mode. Elsewhere Python's own will do"
        )
    return trace


def _tensors(values: Sequence[object], name: str) -> list[Tensor]:
    try:
        # A Python integer is to look as one.
        return [as_tensor(v, *[DType.INT64] * (type(v) is int)) for v in values]
    except CompileError as error:
        raise CompileError(f"{error} (af.debug.{name} takes tensors and numbers)") from None


def _described(value: object) -> str:
    return str(value.type) if isinstance(value, Tensor) else f"{value!r:.60}"


def _emit(
    trace: Trace,
    kind: ProbeKind,
    text: str,
    tensors: list[Tensor],
    predicate: Predicate | None = None,
) -> None:
    """Give the trace a probe; one without tensors gets a 0, for it happens once a batch too."""
    # numpy has no bfloat16.
    wide = [x.to("float32") if x.dtype is DType.BFLOAT16 else x for x in tensors]
    values = [x._value_in(trace) for x in wide or [as_tensor(0)]]
    trace.probe(kind, text, values, predicate)
