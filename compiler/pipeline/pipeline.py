"""Compile: the way of a graph, from the trace to a plan that is proven.

`PASSES` is the one list of every rewrite that runs, in order. `compiler.pipeline.rewrites` checks
it against what each pass needs and provides, so that a wrong order is refused by name; passes that
a user registers are placed among these. The last passes serve a byte budget: they run on the
ordered graph once for every choice that `compiler.budget.search` tries. Then `lower` makes a plan
of the graph, and `verify_plan` proves it. With `options.verify` the graph verifier runs after every
pass, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import compiler.pipeline.standard_ops  # noqa: F401  # registers what the passes read
from compiler.budget import offload, recompute
from compiler.contract.attrs import PlainValue
from compiler.contract.plan import Plan
from compiler.contract.types import DType
from compiler.fusion import regions
from compiler.fusion.fuse import fuse_launches
from compiler.fusion.inline_cheap import inline_cheap
from compiler.fusion.join_updates import merge_updates, update_programs
from compiler.fusion.prepare import dense_operands, narrow_broadcasts, stage_reductions
from compiler.fusion.recompute_cheap import recompute_cheap
from compiler.fusion.regions import fuse_products
from compiler.graph.graph import Graph
from compiler.graph.target import NO_CHOICE, BudgetChoice, CompileOptions, Hardware
from compiler.lowering import buckets
from compiler.lowering.lower import lower
from compiler.lowering.lower import run as compile_bodies
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.transfer import STAGE
from compiler.passes import (
    assign_rows,
    autodiff,
    batches,
    channels_last,
    contiguous,
    place,
    precision,
    simplify,
    value_ranges,
)
from compiler.pipeline.rewrites import (
    Pass,
    PassContext,
    Watch,
    check_order,
    of_graph,
    registered,
    run_passes,
    verify_and_dump,
    with_added,
)
from compiler.sbp import distribute, stages
from compiler.sbp.distribute import RankGraphs
from compiler.storage import order
from compiler.verify.verify import verify_plan


def _asks_for_less(options: CompileOptions) -> bool:
    return options.asks_for_less


def _with_layouts_of_step(graph: Graph, context: PassContext) -> Graph:
    """Return a graph that evaluates with the SBP of the step's variables; O(nodes of both)."""
    if context.step is None:
        return graph
    mesh, zero = context.hardware.ranks.mesh, context.options.zero
    return distribute.with_variable_sbp_of(graph, context.step, mesh, zero=zero)


def _with_devices_of_step(graph: Graph, context: PassContext) -> Graph:
    """Return a graph that evaluates with the step's variables where they lie for the step."""
    if context.step is None:
        return graph
    return place.with_variable_devices_of(graph, context.step, context.hardware)


def _is_scaled(options: CompileOptions) -> bool:
    return options.is_training and options.precision == "fp16"


def _prepare_body(body: Graph, hardware: Hardware, options: CompileOptions) -> Graph:
    """Return a body, as a job of its own, as it is lowered."""
    # Its operands lie on the device already: nothing is fed from the host's side.
    steps = [step for step in _steps(options) if step.name != "feed" and not step.per_choice]
    verify_and_dump(body, "trace", options, None)
    return run_passes(body, steps, PassContext(hardware, options), None)


def _lower_body(body: Graph, hardware: Hardware, options: CompileOptions) -> Plan:
    """Return the plan of a body, proven."""
    plan = lower(body, hardware, options, hash_graph(body))
    verify_plan(plan)
    return plan


def _keeps_rounded(options: CompileOptions) -> bool:
    """Whether parameters are kept in bfloat16, too.

    What a cast may make again later, a variable keeps; and a rank has slices of variables.
    """
    return options.precision == "bf16" and not options.mesh and not options.asks_for_less


PASSES: tuple[Pass, ...] = (
    Pass(
        "variable_layouts",
        _with_layouts_of_step,
        (),
        ("layouts of the step's variables",),
        lambda options: bool(options.mesh and options.evaluate_every),
    ),
    Pass(
        "stages",
        lambda graph, context: stages.run(graph, context.hardware.ranks.mesh.extent(STAGE)),
        (),
        ("a stage for every node",),
    ),
    Pass(
        "fuse_attention",
        of_graph(simplify.fuse_attention),
        ("a stage for every node",),  # it puts nodes where those are that it takes the place of
        ("attention by the block",),
    ),
    Pass("buffers", of_graph(batches.chain_buffers), (), ("buffers from batch to batch",)),
    Pass(
        "autodiff",
        of_graph(autodiff.differentiate),
        ("attention by the block", "buffers from batch to batch"),  # gradients are of the new ops
        ("gradients",),
    ),
    Pass(
        "narrow_bodies",
        of_graph(simplify.narrow_bodies),
        ("gradients",),
        ("bodies of what is read",),
    ),
    Pass(
        "simplify",
        of_graph(simplify.simplify_graph),
        ("gradients", "bodies of what is read"),
        ("minimal",),
    ),
    Pass(
        "unscale",
        of_graph(autodiff.unscale),
        ("minimal",),
        ("gradients without scale",),
        _is_scaled,
    ),
    Pass(
        "skip_updates",
        lambda graph, context: autodiff.skip_updates(graph, context.options.losses or ("loss",)),
        ("minimal", "gradients without scale"),
        ("updates that a broken step skips",),
        is_wanted=lambda options: options.skips_broken_steps,
    ),
    Pass(
        "rescale",
        of_graph(autodiff.rescale),
        ("updates that a broken step skips",),
        ("a scale after the step",),
        _is_scaled,
    ),
    Pass(
        "clip",
        lambda graph, context: autodiff.clip_gradients(graph, context.options),
        # What is clipped is the gradient of the whole step, as large as it is.
        (
            "gradients without scale",
            "updates that a broken step skips",
            "a scale after the step",
        ),
        ("clipped gradients",),
        lambda options: bool(options.clip_norm or options.clip_value),
    ),
    Pass(
        "stage_updates",
        of_graph(autodiff.stage_updates),
        # What it emits reads gradients, which no pass after it may put others in the place of.
        ("minimal", "clipped gradients"),
        ("updates by programs",),
    ),
    Pass(
        "averages",
        of_graph(autodiff.follow_updates),
        ("updates by programs",),
        ("averages of new values",),
    ),
    Pass(
        "distribute",
        lambda graph, context: distribute.run(
            graph, context.hardware.ranks, zero=context.options.zero
        ),
        # Of all that a step is, each rank gets its share; what comes after is a rank's own affair.
        # Norms and products of whole parameters are made whole where they stand as such.
        (
            "minimal",
            "gradients without scale",
            "updates that a broken step skips",
            "a scale after the step",
            "clipped gradients",
            "updates by programs",
            # It sees that an average reads a parameter, while that is whole.
            "averages of new values",
            "layouts of the step's variables",
        ),
        ("parts of values",),
        lambda options: bool(options.mesh),
    ),
    # First of what a rank does alone: by then it is known what the whole step has where.
    Pass(
        "variable_devices",
        _with_devices_of_step,
        ("parts of values",),
        ("devices of the step's variables",),
        lambda options: len(options.devices) > 1 and bool(options.evaluate_every),
    ),
    Pass(
        "sparse_update",
        of_graph(autodiff.update_rows),
        # A gradient that is searched, clipped, or summed over ranks, is needed in one piece.
        (
            "minimal",
            "updates that a broken step skips",
            "parts of values",
            "clipped gradients",
            "averages of new values",
        ),
        ("updates of rows",),
    ),
    Pass(
        "assign_rows",
        of_graph(assign_rows.assign_rows),
        ("minimal", "updates that a broken step skips", "parts of values"),
        ("assignments of rows",),
    ),
    Pass(
        "precision",
        lambda graph, context: precision.narrow_products(
            graph, DType.BFLOAT16, context.hardware.rounded_bytes
        ),
        ("minimal", "updates by programs"),
        ("products in bfloat16",),
        lambda options: options.precision == "bf16",
    ),
    Pass(
        "half_precision",
        of_graph(partial(precision.narrow_products, low=DType.FLOAT16)),
        ("minimal", "updates by programs"),
        ("products in float16",),
        lambda options: options.precision == "fp16",
    ),
    Pass(
        "value_ranges",
        lambda graph, context: value_ranges.show_ranges(graph, context.options.shown),
        # What is computed indeed, by each rank, while an op of the user's is a node.
        ("parts of values", "updates of rows", "products in bfloat16", "products in float16"),
        ("ranges of values",),
        lambda options: bool(options.debug),
    ),
    Pass(
        "place",
        lambda graph, context: place.place_nodes(graph, context.hardware),
        (
            "updates of rows",
            "updates by programs",
            "products in bfloat16",
            "products in float16",
            "ranges of values",
            "devices of the step's variables",
        ),  # what runs, but for fusion
        ("a device for every node",),
        lambda options: len(options.devices) > 1,
    ),
    Pass(
        "insert_copies",
        lambda graph, context: place.insert_copies(graph, context.hardware),
        ("a device for every node",),
        ("copies between devices",),
        lambda options: len(options.devices) > 1,
    ),
    Pass(
        "contiguous",
        lambda graph, context: contiguous.move_parts_first(graph, context.hardware),
        ("parts of values", "copies between devices"),
        ("parts that lie in one piece",),
        lambda options: bool(options.mesh) and options.has_device,
    ),
    Pass(
        "round_constants",
        # What evaluates between steps only reads what they change.
        lambda graph, context: precision.round_constants(graph) if context.step is None else graph,
        ("products in bfloat16",),
        ("rounded constants",),
        _keeps_rounded,
    ),
    Pass(
        "hold_weights",
        lambda graph, context: channels_last.hold_weights(graph, context.hardware, context.options),
        ("minimal", "copies between devices", "rounded constants"),
        ("weights held",),
    ),
    Pass(
        "channels_last",
        lambda graph, context: channels_last.put_channels_last(graph, context.hardware),
        ("minimal", "copies between devices", "updates by programs", "weights held"),
        ("layouts of images",),
    ),
    Pass(
        "rates",
        of_graph(batches.split_rates),
        (
            "minimal",
            "layouts of images",
            "updates that a broken step skips",
            "a scale after the step",
            "clipped gradients",
            "copies between devices",
            "parts of values",
        ),
        ("rates",),
    ),
    Pass(
        "outputs",
        of_graph(batches.copy_outputs),
        # From here on no value is replaced by another: bytes are given to what there is.
        (
            "rates",
            "updates of rows",
            "assignments of rows",
            "products in bfloat16",
            "products in float16",
        ),
        ("owned outputs",),
    ),
    Pass(
        "update_programs", of_graph(update_programs), ("owned outputs",), ("programs of updates",)
    ),
    Pass(
        "round_in_updates",
        lambda graph, context: precision.round_in_updates(graph, context.hardware),
        ("programs of updates", "products in bfloat16"),
        ("weights rounded by their updates",),
        _keeps_rounded,
    ),
    Pass(
        "stage_reductions",
        of_graph(stage_reductions),
        ("owned outputs",),
        ("reductions by rows",),
    ),
    Pass(
        "narrow_broadcasts",
        of_graph(narrow_broadcasts),
        ("reductions by rows",),
        ("narrow operands",),
    ),
    Pass(
        "recompute_cheap",
        lambda graph, context: recompute_cheap(graph, context.hardware.wide_values),
        ("narrow operands",),
        ("cheap values made where they are read",),
    ),
    Pass(
        "dense_operands",
        of_graph(dense_operands),
        ("cheap values made where they are read",),
        ("operands that a fused kernel can read",),
    ),
    Pass(
        "fuse",
        lambda graph, context: fuse_launches(
            graph, ends_at_saved=True, finishes=context.hardware.epilogue_ops
        ),
        ("operands that a fused kernel can read",),
        ("fused kernels",),
    ),
    Pass(
        "inline_cheap",
        lambda graph, context: inline_cheap(graph, context.hardware.wide_values),
        ("fused kernels",),
        ("cheap values made in kernels",),
        lambda options: options.has_device,
    ),
    Pass(
        "chunk_wide",
        lambda graph, context: regions.run(graph, context.hardware.wide_values),
        ("fused kernels", "cheap values made in kernels"),
        ("wide values by the chunk",),
    ),
    Pass(
        "fuse_products",
        of_graph(fuse_products),
        ("wide values by the chunk",),  # regions begin at products that stand alone
        ("products with what reads them",),
    ),
    Pass(
        "bodies",
        lambda graph, context: compile_bodies(
            graph, context.hardware, context.options, _prepare_body, _lower_body
        ),
        ("owned outputs", "products with what reads them"),  # constants are all made
        ("plans of bodies",),
    ),
    Pass("order", of_graph(order.run), ("owned outputs", "plans of bodies"), ("order",)),
    Pass(
        "buckets",
        of_graph(buckets.run),
        ("order", "parts of values", "parts that lie in one piece"),
        ("collectives by the bucket",),
    ),
    Pass(
        "feed",
        lambda graph, context: batches.feed_devices(graph, context.hardware.devices),
        ("order", "collectives by the bucket"),  # it puts copies at the ends of the order
        ("ports on the host's side",),
        lambda options: options.has_device,
    ),
    # In host memory lies what the launches of the plan read, those that run again among them.
    Pass(
        "recompute",
        lambda graph, context: recompute.run(graph, context.choice.launches),
        ("order", "ports on the host's side"),
        ("launches that run again",),
        _asks_for_less,
        per_choice=True,
    ),
    Pass(
        "offload",
        lambda graph, context: offload.offload_variables(
            graph, context.choice.state, context.hardware
        ),
        ("launches that run again",),
        ("state in host memory",),
        _asks_for_less,
        per_choice=True,
    ),
    Pass(
        "spill",
        lambda graph, context: offload.spill_values(
            graph, context.choice.activations, context.hardware
        ),
        ("state in host memory",),
        ("activations in host memory",),
        _asks_for_less,
        per_choice=True,
    ),
    Pass(
        "merge_updates",
        lambda graph, context: merge_updates(graph, context.hardware),
        ("order", "activations in host memory"),  # of what was chosen, whatever that is
        ("updates by the launch",),
        per_choice=True,
    ),
)

LOWERING_NEEDS: tuple[str, ...] = tuple([fact for step in PASSES for fact in step.provides])
"""What lowering takes for granted: everything.

Nothing after them makes up for a rewrite that did not happen.
"""


LAST_OF_RANKS = "distribute"
"""The last pass whose result depends on the number of the rank."""


class LocalGraphs(NamedTuple):
    """What one rank of several has of a job's graph, and of the one that evaluates between steps.

    Compiling has come as far as `LAST_OF_RANKS`: ranks with equal ones have equal plans.
    """

    step: Graph
    evaluation: Graph | None = None


def local_graphs(
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    watch: Watch | None = None,
    evaluation: Graph | None = None,
) -> LocalGraphs:
    """Return what one rank has of a traced graph, and of one that evaluates between its steps.

    Raises CompileError.
    """
    options = _completed(options, hardware)
    verify_and_dump(graph, "trace", options, None)
    context = PassContext(hardware, options)
    before, of_ranks, _ = _parted(_steps(options))
    # Before `distribute` all ranks have the same graph.
    whole = run_passes(graph, before, context, watch)
    step = run_passes(whole, of_ranks, context, watch)
    if evaluation is None:
        return LocalGraphs(step)
    verify_and_dump(evaluation, "trace", options, None)
    # How variables of all stages lie says `whole` alone: `step` has those of one.
    its = PassContext(hardware, options.of_evaluation, step=whole)
    before, of_ranks, _ = _parted(_steps(its.options))
    return LocalGraphs(
        step, run_passes(evaluation, (*before, *of_ranks), its, watch, "evaluation ")
    )


def graphs_of_ranks(graph: Graph, hardware: Hardware, options: CompileOptions) -> RankGraphs:
    """Return what each rank of a mesh has of a traced graph: what `local_graphs` returns of one.

    Raises CompileError.
    """
    options = _completed(options, hardware)
    before, _, _ = _parted(_steps(options))
    shared = run_passes(graph, before, PassContext(hardware, options), None)
    return RankGraphs(shared, hardware.ranks, zero=options.zero)


def compile_graph(
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    watch: Watch | None = None,
    evaluation: Graph | None = None,
    local: LocalGraphs | None = None,
) -> Plan:
    """Return the verified plan of a traced graph, and of one that evaluates between its steps.

    Of several ranks it is the plan of one. With `local`, what `local_graphs` made of both graphs
    for such hardware and options, compiling goes on from there. Raises CompileError for what the
    user can mend, InternalError for a bug of ours.
    """
    options = _completed(options, hardware)
    # Before any pass: it names what the user traced.
    fingerprint, added = hash_graph(graph), tuple([plugin.name for plugin in registered()])
    record: list[tuple[str, PlainValue]] = [("passes", added)] if added else []
    if evaluation is not None:
        record.append(("evaluation", hash_graph(evaluation)))
    if local is None:
        local = local_graphs(graph, hardware, options, watch, evaluation)
    graph, evaluation = local
    graph = run_passes(graph, _parted(_steps(options))[-1], PassContext(hardware, options), watch)
    if evaluation is not None:
        its = PassContext(hardware, options.of_evaluation, step=graph)
        rest = _parted(_steps(its.options))[-1]
        evaluation = run_passes(evaluation, rest, its, watch, "evaluation ")

    def lowered(ordered: Graph) -> Plan:
        return lower(ordered, hardware, options, fingerprint, evaluation)

    if _asks_for_less(options):
        plan = _within_budget(graph, hardware, options, lowered, watch)
    else:
        plan = lowered(with_choice(graph, NO_CHOICE, hardware, options, watch))
    if record:
        plan = replace(plan, options=(*plan.options, *record))
    # The plan is proven by other rules than those that made it.
    verify_plan(plan)
    return plan


def _steps(options: CompileOptions) -> tuple[Pass, ...]:
    """Return the passes that the options want, in order, those from elsewhere among them."""
    return check_order(with_added(PASSES), options, LOWERING_NEEDS)


def _completed(options: CompileOptions, hardware: Hardware) -> CompileOptions:
    """Return options with what the hardware says of devices and ranks."""
    devices = tuple([str(device) for device in hardware.devices])
    ranks = hardware.ranks
    hosts = () if ranks.hosts is None else ranks.hosts.record
    return replace(options, devices=devices, mesh=ranks.mesh.axes, hosts=hosts)


def _parted(steps: Sequence[Pass]) -> tuple[Sequence[Pass], ...]:
    """Return the passes over what all ranks have, the one that shares it out, and those after.

    Those that run for each choice of a budget are left out: `with_choice` runs them.
    """
    steps = [step for step in steps if not step.per_choice]
    names = [step.name for step in steps]
    # Without a mesh `distribute` does not run, and every pass is a rank's own.
    at = names.index(LAST_OF_RANKS) if LAST_OF_RANKS in names else 0
    count = at + names.count(LAST_OF_RANKS)
    return steps[:at], steps[at:count], steps[count:]


def _within_budget(
    graph: Graph,
    hardware: Hardware,
    options: CompileOptions,
    lowered: Callable[[Graph], Plan],
    watch: Watch | None,
) -> Plan:
    """Return the plan of an ordered graph with what is chosen so that it is small enough."""
    from compiler.budget.search import (
        BudgetEvaluator,
        meet_budget,  # and the planner: only where asked for
    )

    graph_of_choice = partial(with_choice, graph, hardware=hardware, options=options)
    choice, plan = meet_budget(BudgetEvaluator(graph, hardware, options, graph_of_choice, lowered))
    # The search runs unwatched; what it chose is made once more to be seen.
    if watch is not None:
        with_choice(graph, choice, hardware, options, watch)
    return plan


def with_choice(
    graph: Graph,
    choice: BudgetChoice,
    hardware: Hardware,
    options: CompileOptions,
    watch: Watch | None = None,
) -> Graph:
    """Return an ordered graph, ready to be lowered, with what was chosen for a budget."""
    steps = [step for step in _steps(options) if step.per_choice]
    return run_passes(graph, steps, PassContext(hardware, options, choice), watch)
