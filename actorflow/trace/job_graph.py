"""From a job's function to its logical graph: one trace for a model and the types of a batch.

The trace records the function's ops, and for a job with an optimizer the gradients of its losses
and the updates of its variables. `grad` gives gradients to the function itself, as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from actorflow.environment.option_values import chosen
from actorflow.environment.settings import collector_paused
from actorflow.functional.random import batches_of, seed_of, step_of
from actorflow.metrics.totals import Metric
from actorflow.nn.module import Module
from actorflow.nn.parameter import Parameter
from actorflow.optim.optimizers import COUNT
from actorflow.optim.recipes import claims
from actorflow.options.job_options import JobOptions, scaled
from actorflow.tensor.layouts import place_traced
from actorflow.tensor.tensor import Tensor, as_tensor
from actorflow.tensor.tracer import (
    Trace,
    current_trace,
    find_source,
    recording,
    require_trace,
    source_of,
)
from compiler.contract.attrs import NO_ATTRS
from compiler.contract.errors import CompileError
from compiler.contract.placement import HOST, Device
from compiler.contract.probe import is_probe
from compiler.contract.statistic import is_statistic
from compiler.contract.types import Phase, TensorType, ValueId
from compiler.graph.graph import Accumulation, Graph, Output, SourceLocation, Write
from compiler.graph.target import GRAD_NORM, LOSS_SCALE
from compiler.ops.families.updates import ASSIGN, INCREMENT
from compiler.ops.language.definition import clear_definition_caches

Function = Callable[[Any, Any], Any]

RESERVED = ("step", "seed", "batches", COUNT)
"""Variables of the engine's own: steps done, the seed of the run, batches done, steps averaged."""


class Batch:
    """`batch.x` and `batch["x"]` are the tensor of the data source's entry "x"."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __getitem__(self, key: str) -> Tensor:
        """Return the tensor of an entry. Raises CompileError naming the entries there are."""
        return Tensor(self._trace, self._trace.batch_input(key))

    def __getattr__(self, key: str) -> Tensor:
        """Return the tensor of an entry, as `batch[key]`."""
        # copy, pickle and debuggers ask for such names, and expect AttributeError.
        if key.startswith("_"):
            raise AttributeError(key)
        return self[key]


def trace_job(
    name: str,
    function: Function,
    options: JobOptions,
    model: Module,
    spec: Mapping[str, TensorType],
    devices: tuple[Device, ...] = (HOST,),
) -> Graph:
    """Return the graph of a job's function. Raises CompileError with the user's line."""
    names = {id(stored): path for path, stored in model.named_stored()}
    paths = {id(m): path for path, m in model.named_modules()}
    trace = Trace(
        spec,
        names,
        paths,
        is_training=options.train,
        batches_per_step=options.accumulate,
        devices=devices,
        mesh=options.mesh if options.has_ranks else None,
    )
    # Definitions may read globals of the user, which may have changed since the last trace.
    clear_definition_caches()
    with collector_paused(), recording(trace):
        add_step(trace, name, function, options, model)
        place_traced(trace)
    return replace(trace.builder.freeze(), predicates=trace.predicates)


def add_step(
    trace: Trace, name: str, function: Function, options: JobOptions, model: Module
) -> None:
    """Call a job's function in a trace, and add what a step does: its outputs, updates, writes."""
    b = trace.builder
    returned = _outputs(name, function(model, Batch(trace)), options.losses)
    shown = b.outputs  # by probes, on the way
    outputs: dict[str, Tensor] = {}
    for key, value in returned.items():
        outputs |= value.outputs(key) if isinstance(value, Metric) else {key: value}
    values = {key: t._value_in(trace) for key, t in outputs.items()}
    b.outputs = [Output(k, v, b.producer_of(v).source) for k, v in values.items()] + shown
    if options.train:
        losses = {key: outputs[key] for key in options.losses}
        _add_update(trace, name, source_of(function), options, model, losses)
    elif trace.has_drawn:
        _check_names(model)
        _count_step(trace)
    _add_assignments(trace)


def _add_update(
    trace: Trace,
    job: str,
    where: SourceLocation,
    options: JobOptions,
    model: Module,
    losses: Mapping[str, Tensor],
) -> None:
    b = trace.builder
    if options.scaling is not None:
        _check_scale_name(trace, where, job)
        losses = scaled(trace, losses, options.scaling)
    trainable = _trainable(where, job, options, model)
    paths = [path for path, _ in model.named_parameters()]
    parts = list(zip(options.parts, claims(options.parts, paths, trainable), strict=True))
    _check_names(model)
    trained = {}
    for name in [name for _, names in parts for name in names]:
        parameter = trainable[name]
        if not trace.has_variable(name):
            raise CompileError(
                f"{parameter.source}: parameter {name!r} is not used by job {job!r}, so"
                " it has no path to the loss. Use it, remove it, or freeze it with"
                " parameter.freeze()"
            )
        trained[name] = parameter.type
    if not trained:
        raise CompileError(
            f"{where}: job {job!r} has an optimizer, but its model has no parameter to train; do"
            " not freeze all of them, nor leave all out with trainable=, or give"
            " @af.job(train=False) to compute outputs only"
        )
    if options.clip_norm is not None and GRAD_NORM in [output.name for output in b.outputs]:
        raise CompileError(
            f"{where}: job {job!r} returns {GRAD_NORM!r}, and clip_norm adds an output of this"
            " name, the norm of the gradients of a step. Rename the output of the job"
        )
    # Declared here, so that every training has them, also one that draws nothing.
    seed_of(trace)
    step_of(trace)
    for part, names in parts:
        objective = losses[part.loss]._value_in(trace)
        rules = part.optimizer.rules(trace, {name: trained[name] for name in names})
        b.updates += [replace(rule, objective=objective) for rule in rules]
    if options.averaging is not None:
        options.averaging.add_to(trace, trained)
    _count_step(trace)
    if options.accumulate > 1:
        b.accumulation = Accumulation(options.accumulate, batches_of(trace)._value_in(trace))


def _check_names(model: Module) -> None:
    """Raise CompileError where the model keeps something under a name of the engine's own."""
    for name, stored in model.named_stored():
        if name in RESERVED:
            raise CompileError(
                f"{stored.source}: a {stored.kind} cannot be called {name!r}: a counter of the"
                " engine has that name; rename the attribute"
            )


def _count_step(trace: Trace) -> None:
    """Count the steps of the job, by which each has random numbers of its own."""
    step = step_of(trace)._value_in(trace)
    with trace.scope("optimizer"):
        next_step = trace.emit(INCREMENT, [step], NO_ATTRS)[0]
    trace.builder.writes.append(Write(step, next_step))


def _trainable(
    where: SourceLocation, job: str, options: JobOptions, model: Module
) -> dict[str, Parameter]:
    """Return the parameters that a job may train, by path."""
    named = dict(model.named_parameters())
    if options.trainable is not None:
        what = f"{where}: trainable of job {job!r}"
        named = {path: named[path] for path in chosen(options.trainable, list(named), what)}
    return {path: parameter for path, parameter in named.items() if not parameter.is_frozen}


def _add_assignments(trace: Trace) -> None:
    """Write what was assigned to buffers where they are, when the step has read them."""
    b = trace.builder
    for assigned in trace.assigned.values():
        # The last value counts; a buffer that got its own value back is not written.
        if assigned.value != assigned.variable:
            device = b.producer_of(assigned.variable).device
            with b.at(assigned.scope, assigned.source, Phase.UPDATE, device):
                value = b.emit_one(ASSIGN, assigned.variable, assigned.value)
            b.writes.append(Write(assigned.variable, value))


def _check_scale_name(trace: Trace, where: SourceLocation, job: str) -> None:
    names = [output.name for output in trace.builder.outputs]
    if LOSS_SCALE in names or trace.has_variable(LOSS_SCALE):
        raise CompileError(
            f"{where}: job {job!r} computes in float16, which adds an output and a variable"
            f" {LOSS_SCALE!r}, the factor of the loss. Rename the output or the parameter of the"
            " job"
        )


def _outputs(job: str, returned: Any, losses: tuple[str, ...]) -> dict[str, Tensor | Metric]:
    name = "loss" if losses else "output"
    outputs = dict(returned) if isinstance(returned, Mapping) else {name: returned}
    for key, value in outputs.items():
        if is_probe(str(key)) or is_statistic(str(key)):
            prefix, owner = ("debug/", "debug") if is_probe(str(key)) else ("statistic/", "metrics")
            raise CompileError(
                f"job {job!r} returned {key!r}; names that begin with {prefix!r} are those of"
                f" af.{owner}, so give the output another one"
            )
        if not isinstance(value, (Tensor, Metric)):
            raise CompileError(
                f"job {job!r} returned {type(value).__name__} as {key!r}; return a tensor or a"
                " metric, or a dict of them"
            )
    if not outputs:
        raise CompileError(f"job {job!r} returned nothing")
    for key in losses:
        if key not in outputs:
            raise CompileError(
                f"job {job!r} returned {sorted(outputs)}; a training job's dict needs the"
                f" key {key!r}, which it trains on"
            )
        loss = outputs[key]
        if isinstance(loss, Metric):
            raise CompileError(
                f"{loss.source}: job {job!r} trains on {key!r}, a metric, which has no gradient;"
                " return a tensor, such as af.cross_entropy, under this name"
            )
        if loss.shape != () or not loss.dtype.is_float:
            named = "the loss" if key == "loss" else f"the loss {key!r}"
            mend = "; reduce it with .mean() or .sum()" if loss.shape else ""
            raise CompileError(
                f"{_line(loss)}: {named} of job {job!r} must be a float scalar, it is"
                f" {loss.type}{mend}"
            )
    return outputs


def _line(tensor: Tensor) -> str:
    trace = current_trace()
    if trace is None:
        return "job"
    return str(trace.builder.producer_of(tensor._value_in(trace)).source)


Wanted = Any
"""A tensor, a list or tuple of tensors, a mapping of tensors, or a module: its parameters."""


Outputs = Tensor | Sequence[Tensor]
Flows = Tensor | Sequence[Tensor | None] | None


@overload
def grad(outputs: Outputs, inputs: Tensor, grad_outputs: Flows = ...) -> Tensor: ...
@overload
def grad(
    outputs: Outputs, inputs: Module | Mapping[str, Tensor], grad_outputs: Flows = ...
) -> dict[str, Tensor]: ...
@overload
def grad(
    outputs: Outputs, inputs: Sequence[Tensor], grad_outputs: Flows = ...
) -> tuple[Tensor, ...]: ...
@overload
def grad(
    outputs: Outputs, inputs: Wanted, grad_outputs: Flows = ..., *, allow_unused: bool
) -> Any: ...
def grad(
    outputs: Outputs,
    inputs: Wanted,
    grad_outputs: Flows = None,
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
    import compiler.pipeline.standard_ops  # noqa: F401  # registers gradients; no business of `import`

    trace = require_trace("af.grad")
    names, tensors = _named(inputs)
    seeds = _seeds(trace, _listed(outputs, "outputs"), grad_outputs)
    values = [
        _float_in(trace, tensor, f"input {name}")
        for name, tensor in zip(names, tensors, strict=True)
    ]
    gradients = trace.gradients(seeds, values)
    for name, value in zip(names, values, strict=True):
        if value not in gradients and not allow_unused:
            raise CompileError(
                f"{find_source()}: no output of af.grad depends on input {name}; give"
                " allow_unused=True to get None for it"
            )
    grads = [Tensor(trace, gradients[value]) if value in gradients else None for value in values]
    if isinstance(inputs, (Module, Mapping)):
        return dict(zip(names, grads, strict=True))
    return grads[0] if isinstance(inputs, Tensor) else tuple(grads)


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
    seeds = dict[ValueId, ValueId]()
    for number, (output, flow) in enumerate(zip(outputs, flows, strict=True)):
        value = _float_in(trace, output, f"output {number}")
        if flow is None:
            if output.shape:
                raise CompileError(
                    f"{find_source()}: output {number} of af.grad is no scalar, but"
                    f" {output.type}; reduce it with .sum(), or say with grad_outputs what flows"
                    " into it"
                )
            seed = trace.one(value)
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
            # An output that is listed twice has two flows, as torch sums them.
            seed = (Tensor(trace, earlier) + Tensor(trace, seed))._value_in(trace)
        seeds[value] = seed
    return seeds


def _flows(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]
