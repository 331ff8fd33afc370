"""What a job asks of its plan: compile options, the graph of its evaluation, or the plan alone.

A plan alone is asked for by `capturing_plan`: the first `fit` of a script then ends it, with the
plan that it would run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actorflow.environment.settings import logger
from actorflow.optim.optimizers import AVERAGE, COUNT
from actorflow.options.job_options import JobOptions
from actorflow.options.run_spec import SKIP, Evaluation, PlanOptions, spec_of_source
from actorflow.tensor.tracer import find_source
from compiler.contract.attrs import Attrs
from compiler.contract.errors import CompileError
from compiler.contract.placement import SINGLE_RANK, Device, RankContext
from compiler.contract.probe import is_probe
from compiler.contract.statistic import is_statistic
from compiler.contract.types import TensorType, ValueId
from compiler.graph.graph import UNPLACED, Graph, Output
from compiler.graph.target import GRAD_NORM, LEARNING_RATE, CompileOptions, Hardware
from compiler.ops.families.weights import with_weights
from compiler.ops.primitives.sources import EVALUATED, OF_MODEL, VARIABLE

if TYPE_CHECKING:
    from actorflow.compile.compiling import JobSpec
    from actorflow.nn.module import Module
    from compiler.contract.plan import Plan


PlanFor = Callable[[Mapping[str, TensorType], str | None], "Plan"]
"""Plans a job for batches of some types, within a memory budget, or with all values stored."""


@dataclass(frozen=True, slots=True)
class CapturedPlan:
    """A plan that is asked for without a run; of a plan file there is nothing else.

    `store_all` is the same plan without recomputation, where the job asks for some; `job_spec` is
    what the plan was compiled of; `plan_for` plans the job for other batches.
    """

    plan: Plan
    store_all: Plan | None = None
    job_spec: JobSpec | None = None
    plan_for: PlanFor | None = None


class PlanCaptured(BaseException):
    """Ends a script at its first `fit` while a plan is only asked for; see `capturing_plan`."""

    def __init__(self, captured: CapturedPlan) -> None:
        super().__init__("plan captured")
        self.captured = captured


def captured(
    plan: Plan,
    job_spec: JobSpec,
    spec: Mapping[str, TensorType],
    options: JobOptions,
    plan_of: Callable[[JobOptions, Mapping[str, TensorType]], Plan],
) -> PlanCaptured:
    """Return what takes the plan of a `fit` out; `plan_of` plans the job with other options."""

    def plan_for(spec: Mapping[str, TensorType], budget: str | None) -> Plan:
        mode = "auto" if budget else "none"
        return plan_of(replace(options, memory_budget=budget, recompute=mode), spec)

    recomputes = options.memory_budget or options.recompute == "blocks"
    store_all = plan_for(spec, None) if recomputes else None
    return PlanCaptured(CapturedPlan(plan, store_all, job_spec, plan_for))


CAPTURING: ContextVar[RankContext | None] = ContextVar("actorflow_capturing", default=None)
"""The ranks of the plan that is asked for; None where a `fit` is to run.

Where that is one, ranks are those of the job's mesh; its `rank` says whose plan of them, and its
`hosts` what they are on.
"""


@contextmanager
def capturing_plan(ranks: RankContext = SINGLE_RANK) -> Iterator[None]:
    """Make the next `fit` raise PlanCaptured, with the plan of one of some ranks, and not run."""
    token = CAPTURING.set(ranks)
    try:
        yield
    finally:
        CAPTURING.reset(token)


def asked_rows(spec: dict[str, TensorType]) -> dict[str, TensorType]:
    """Return the types of a batch of all ranks that a plan is asked for: each has one of these."""
    ranks = CAPTURING.get()
    if ranks is None or ranks.count == 1:
        return spec
    return {
        name: replace(type_, shape=(type_.shape[0] * ranks.count, *type_.shape[1:]))
        if type_.rank
        else type_
        for name, type_ in spec.items()
    }


def compile_options(
    name: str,
    job: JobOptions,
    call: PlanOptions,
    hardware: Hardware,
    *,
    gpu: str = "",
    metrics_every: int = 1,
    verify: bool = False,
    debug: str = "",
) -> CompileOptions:
    """Return what the compiler is told of a job, and of the call that wants a plan of it.

    `debug` is that of jobs that have none.
    """
    period, evaluation = call.period, call.evaluation
    return CompileOptions(
        name=name,
        devices=tuple([str(device) for device in hardware.devices]),
        is_training=job.train,
        snapshot_every=math.gcd(period.steps or 0, call.kept_steps) if period else 0,
        snapshot_seconds=(period.seconds or 0.0) if period else 0.0,
        accumulate=job.accumulate,
        metrics_every=metrics_every,
        # Ranks may listen on some of them only, and have one plan all the same.
        waits_for_listener=call.has_listener and not job.has_ranks,
        num_streams=job.streams,
        evaluate_every=evaluation.every if evaluation else 0,
        evaluate_batches=evaluation.batches if evaluation else 0,
        memory_budget=job.budget_bytes,
        recompute=job.recompute,
        offload=job.offload,
        zero=job.zero,
        precision=job.precision,
        # An infinite norm clips nothing, and is an output.
        clip_norm=job.clip_norm or (math.inf if GRAD_NORM in call.asked_outputs else 0.0),
        clip_value=job.clip_value or 0.0,
        # () for the default, so that it leaves the key of a plan as it is without the option.
        losses=() if job.losses == ("loss",) else job.losses,
        evaluate_precision=evaluation.job.options.precision if evaluation else "fp32",
        skips_broken_steps=(call.on_nan == SKIP and job.train) or job.scaling is not None,
        gpu=gpu,
        deterministic=bool(gpu) and job.deterministic,
        debug=(job.debug or debug) if call.shown is None else "inf",
        shown=call.shown or (),
        verify=verify,
    )


def with_rates(graph: Graph, job: str) -> Graph:
    """Return the graph of a job with its learning rates as outputs: `lr`, or `lr/<path>` of each.

    A rate is there for the updates already, so this costs nothing but handing it out. Raises
    CompileError where the job has such an output of its own.
    """
    paths = {
        node.outputs[0]: node.attrs.str_("name") for node in graph.nodes if node.op is VARIABLE
    }
    rates: dict[ValueId, str] = {}
    for rule in graph.updates:
        rates.setdefault(rule.scalars[0], f"{LEARNING_RATE}/{paths[rule.variable]}")
    if len(rates) == 1:
        rates = dict.fromkeys(rates, LEARNING_RATE)
    if taken := {output.name for output in graph.outputs} & {*rates.values()}:
        raise CompileError(
            f"{find_source()}: job {job!r} returns {min(taken)!r}, and the learning rate is asked"
            " for under this name; rename the output"
        )
    outputs = [Output(name, rate) for rate, name in rates.items()]
    return replace(graph, outputs=(*graph.outputs, *outputs))


def evaluation_graph(
    evaluation: Evaluation | None, model: Module, devices: tuple[Device, ...], training: Graph
) -> Graph | None:
    """Return the graph of an evaluation that is part of a training on some devices, if there is.

    Raises CompileError for what its job asks of an arena or of devices that are the training's,
    where it has no scalar to report, and where it wants averages that the training has not.
    """
    if evaluation is None:
        return None
    job = evaluation.job
    if job.options.memory_budget is not None:
        raise CompileError(
            f"{find_source()}: job {job.name!r} has a memory_budget, but evaluates in the arena of"
            " the training: give the budget to the training job, which counts the evaluation too"
        )
    if job.options.placed_on not in ((), devices):
        named, own = (", ".join(map(str, group)) for group in (job.options.placed_on, devices))
        raise CompileError(
            f"{find_source()}: job {job.name!r} is for {named}, but evaluates in a training on"
            f" {own}; give both the same devices, or the evaluation none"
        )
    graph = job.graph(model, asked_rows(spec_of_source(evaluation.data)))
    results = {o.name: graph.types[o.value] for o in graph.outputs if not is_probe(o.name)}
    check_results(results, job.name)
    graph = with_weights(graph)
    graph = _beside_training(graph, job.name)
    if evaluation.ema:
        graph = _of_averages(graph, training, job.name)
    if job.options.placed_on:
        return graph
    # The trace knows what the environment says; the evaluation runs where its training does.
    place = 0 if len(devices) == 1 else UNPLACED
    nodes = [replace(node, device=place) for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def _beside_training(graph: Graph, job: str) -> Graph:
    """Return a graph that changes nothing of the training, and counts its batches by itself.

    The training has its own count of steps. What the job assigns to buffers goes with the batch, or
    a training would depend on how often it is looked at; the log says so.
    """
    made_by, nodes, writes = graph.producers(), list(graph.nodes), []
    for write in graph.writes:
        place = made_by[write.variable]
        variable = nodes[place]
        if variable.attrs.str_("role") in OF_MODEL:
            logger.warning(
                "%s: job %r assigns buffer %r; between the steps of a training it does so for one"
                " batch alone, and the training keeps its own value",
                nodes[made_by[write.value]].source,
                job,
                variable.attrs.str_("name"),
            )
            continue
        attrs = {**variable.attrs, "name": f"{EVALUATED}/batches", "role": EVALUATED}
        nodes[place] = replace(variable, attrs=Attrs(attrs))
        writes.append(write)
    return replace(graph, nodes=tuple(nodes), writes=tuple(writes))


def _of_averages(graph: Graph, training: Graph, job: str) -> Graph:
    """Return a graph that reads the averages of the training in place of parameters."""
    # The training's own attributes: the same name and type make it the same variable of the plan.
    named = {n.attrs["name"]: n.attrs for n in training.nodes if n.op is VARIABLE}
    nodes = []
    for node in graph.nodes:
        name = AVERAGE + node.attrs.str_("name") if node.op is VARIABLE else ""
        nodes.append(replace(node, attrs=named[name]) if name in named else node)
    if COUNT not in named:
        raise CompileError(
            f"{find_source()}: job {job!r} is to evaluate averages of the weights, and the"
            " training keeps none; give it @af.job(ema=0.999), or leave out ema=True"
        )
    return replace(graph, nodes=tuple(nodes))


def check_same_state(job: str, plans: Sequence[Plan]) -> None:
    """Raise CompileError where plans for batches of several types have other variables."""
    first, *others = [
        {v.name: (str(p.views[v.view].type), str(v.sharding)) for v in p.state} for p in plans
    ]
    for other in others:
        apart = sorted(dict(other.items() ^ first.items()))
        if apart:
            raise CompileError(
                f"{find_source()}: job {job!r} has other variables for other shapes of its batches:"
                f" {', '.join(map(repr, apart[:3]))}; use all parameters for every shape, and none"
                " whose own shape follows from that of the batch"
            )


def warn_of_fresh_start(job: str, num_steps: int, counted: str) -> None:
    """Warn that a second `fit` starts afresh and does not continue the first."""
    logger.warning(
        "%s: fit of job %r starts at step 0 with new optimizer state, although it has trained this"
        " model for %d steps before: without checkpoint=, %s counts what this call does. Give"
        " both calls the same checkpoint= to continue",
        find_source(),
        job,
        num_steps,
        counted,
    )


def check_results(outputs: Mapping[str, Any], job: str) -> None:
    """Raise CompileError when an evaluation has no scalar to report."""
    if not any([type_.shape == () or is_statistic(name) for name, type_ in outputs.items()]):
        types = ", ".join(f"{name!r}: {type_}" for name, type_ in outputs.items())
        raise CompileError(
            f"{find_source()}: job {job!r} evaluates to {types}; an evaluation reports"
            " metrics, and means of scalars, so return at least one, such as a loss"
        )


def variables_of(graph: Graph) -> frozenset[str]:
    """Return the names of the variables that a traced job uses."""
    return frozenset([n.attrs.str_("name") for n in graph.nodes if n.op is VARIABLE])


def assigned_buffers(graph: Graph) -> frozenset[str]:
    """Return the paths of the buffers that a traced job assigns."""
    made_by = graph.producers()
    variables = [graph.nodes[made_by[write.variable]].attrs for write in graph.writes]
    return frozenset([v.str_("name") for v in variables if v.str_("role") in OF_MODEL])
