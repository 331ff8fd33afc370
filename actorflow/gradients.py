"""Gradients as tensors of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actorflow.nn.module import Module
from actorflow.tensor import Tensor, as_tensor
from actorflow.trace.tracer import Trace, current_trace, find_source
from compiler.errors import CompileError
from compiler.gradients import emit_gradients
from compiler.ops.sources import scalar
from compiler.types import Phase, ValueId

Wanted = Any
"""A tensor, a list or tuple of tensors, a mapping of tensors, or a module: its parameters."""


def grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Wanted,
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    *,
    allow_unused: bool = False,
) -> Any:
    """Return the gradients of the sum of `outputs` by `inputs`, in the form of `inputs`.

    Follows torch.autograd.grad. They are tensors like others: they can be returned by the job, and
    differentiated again, as far as the ops they are made of have gradients.

        (slope,) = af.grad(critic(x), [x], grad_outputs=[ones])
        norms = af.grad(loss, model)  # a dict, by the path of each parameter that is not frozen

    Args:
        outputs: floats; scalars, unless `grad_outputs` says what flows into them.
        inputs: floats; anything that the outputs were computed from, in between too.
        grad_outputs: per output a tensor of its type, or None for ones into a scalar.
        allow_unused: None for an input that no output depends on, where it is an error else.

    Raises CompileError with the user's line.
    """
    import compiler.ops.standard  # noqa: F401  # registers gradients; no business of `import`

    trace = current_trace()
    if trace is None:
        raise CompileError(
            f"{find_source()}: af.grad was called outside of a job; call it inside a function"
            " decorated with @af.job"
        )
    names, tensors = _named(inputs)
    seeds = _seeds(trace, _listed(outputs, "outputs"), grad_outputs)
    values = [
        _float_in(trace, tensor, f"input {name}")
        for name, tensor in zip(names, tensors, strict=True)
    ]
    made = emit_gradients(trace.builder, seeds, values)
    for name, value in zip(names, values, strict=True):
        if value not in made and not allow_unused:
            raise CompileError(
                f"{find_source()}: no output of af.grad depends on input {name}; give"
                " allow_unused=True to get None for it"
            )
    found = [Tensor(trace, made[value]) if value in made else None for value in values]
    if isinstance(inputs, (Module, Mapping)):
        return dict(zip(names, found, strict=True))
    return found[0] if isinstance(inputs, Tensor) else tuple(found)


def _named(inputs: Wanted) -> tuple[list[Any], list[Any]]:
    """Return what is differentiated by, with the names that errors and results have for it."""
    if isinstance(inputs, Module):
        inputs = {path: p for path, p in inputs.named_parameters() if not p.is_frozen}
    if isinstance(inputs, Mapping):
        return list(inputs), list(inputs.values())
    tensors = _listed(inputs, "inputs")
    return list(range(len(tensors))), tensors


def _listed(given: Any, what: str) -> list[Any]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, (list, tuple)) and given:
        return list(given)
    came = "an empty list" if isinstance(given, (list, tuple)) else type(given).__name__
    raise CompileError(
        f"{find_source()}: af.grad needs a tensor or a list of tensors as {what}, got {came}"
    )


def _float_in(trace: Trace, tensor: Any, what: str) -> ValueId:
    if not isinstance(tensor, Tensor):
        raise CompileError(
            f"{find_source()}: {what} of af.grad must be a tensor, got {type(tensor).__name__}"
        )
    if not tensor.dtype.is_float:
        raise CompileError(
            f"{find_source()}: {what} of af.grad must be of a float dtype, got {tensor.type}"
        )
    return tensor._value_in(trace)


def _seeds(trace: Trace, outputs: list[Any], given: Any) -> dict[ValueId, ValueId]:
    """Return what flows into each output; one that comes twice gets the sum."""
    flows = [None] * len(outputs) if given is None else _flows(given)
    if len(flows) != len(outputs):
        raise CompileError(
            f"{find_source()}: af.grad got {len(outputs)} outputs and {len(flows)} grad_outputs"
        )
    b, seeds = trace.builder, dict[ValueId, ValueId]()
    for number, (output, flow) in enumerate(zip(outputs, flows, strict=True)):
        value = _float_in(trace, output, f"output {number}")
        if flow is None:
            if output.shape:
                raise CompileError(
                    f"{find_source()}: output {number} of af.grad is no scalar, but"
                    f" {output.type}; reduce it with .sum(), or say with grad_outputs what flows"
                    " into it"
                )
            with b.beside(b.producer_of(value), Phase.BACKWARD):
                seed = scalar(b, 1.0, output.dtype)
        else:
            flowing = as_tensor(flow, output.dtype)
            if flowing.type != output.type:
                raise CompileError(
                    f"{find_source()}: grad_outputs {number} of af.grad must be {output.type} as"
                    f" its output is, got {flowing.type}"
                )
            seed = flowing._value_in(trace)
        earlier = seeds.get(value)
        if earlier is not None:
            seed = (Tensor(trace, earlier) + Tensor(trace, seed))._value_in(trace)
        seeds[value] = seed
    return seeds


def _flows(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
