"""The order of the passes against what each says it needs: any other order is refused by name."""

from dataclasses import replace
from itertools import product

import pytest
from error_texts import raises

from compiler.contract.errors import CompileError, InternalError
from compiler.graph.graph import Output
from compiler.graph.target import CompileOptions
from compiler.ops.primitives.matmul import MATMUL
from compiler.ops.primitives.reduce import SUM
from compiler.pipeline.pipeline import LOWERING_NEEDS, PASSES, compile_graph
from compiler.pipeline.rewrites import Pass, check, check_order

EVERYTHING = CompileOptions(
    "job",
    precision="bf16",
    skips_broken_steps=True,
    clip_norm=1.0,
    debug="nan",
    memory_budget=1,
    devices=("host:0", "sim:0"),
    mesh=(("data", 2),),
    evaluate_every=1,
)
IN_FLOAT16 = replace(EVERYTHING, precision="fp16")
FREE = replace(EVERYTHING, memory_budget=0, mesh=())


def wanting(*steps):
    """Return options that want as much as can be, and these passes among it."""
    choices = EVERYTHING, IN_FLOAT16, FREE
    return next(one for one in choices if all(step.is_wanted(one) for step in steps))


def swapped(index):
    passes = list(PASSES)
    passes[index : index + 2] = passes[index + 1], passes[index]
    return tuple(passes)


@pytest.mark.parametrize("settings", [*product(("fp32", "bf16", "fp16"), (False, True))])
def test_the_passes_stand_in_an_order_that_all_their_needs_allow(settings):
    precision, skips = settings
    options = CompileOptions("job", precision=precision, skips_broken_steps=skips)
    chosen = check_order(PASSES, options, LOWERING_NEEDS)
    assert chosen == tuple(step for step in PASSES if step.is_wanted(options))


def test_every_need_is_a_fact_that_an_earlier_pass_provides():
    provided = set()
    for step in PASSES:
        assert set(step.needs) <= provided
        provided |= set(step.provides)


CONTRADICTING = [
    index
    for index in range(len(PASSES) - 1)
    if set(PASSES[index].provides) & set(PASSES[index + 1].needs)
]


@pytest.mark.parametrize("index", CONTRADICTING, ids=lambda i: PASSES[i].name)
def test_two_neighbours_of_which_one_needs_the_other_cannot_be_swapped(index):
    first, second = PASSES[index : index + 2]
    with raises(InternalError):
        check_order(swapped(index), wanting(first, second), LOWERING_NEEDS)


@pytest.mark.parametrize("left_out", PASSES, ids=lambda step: step.name)
def test_no_pass_can_be_left_out_of_the_list(left_out):
    passes = tuple([step for step in PASSES if step is not left_out])
    options = wanting(left_out)
    with raises(InternalError):
        check_order(passes, options, LOWERING_NEEDS)


def test_what_the_options_leave_out_is_waived_and_not_refused():
    plain = CompileOptions("job")
    assert "products in bfloat16" in LOWERING_NEEDS
    assert "precision" not in [step.name for step in check_order(PASSES, plain, LOWERING_NEEDS)]


def test_two_passes_that_provide_one_fact_are_refused():
    again = Pass("again", lambda graph, context: graph, (), ("order",))
    with raises(InternalError):
        check_order((*PASSES, again), EVERYTHING, LOWERING_NEEDS)


def test_a_pass_that_runs_after_the_order_was_decided_must_say_so():
    """A misplaced rewrite: what it needs is made only after it."""
    place = [step.name for step in PASSES].index("order")
    late = replace(PASSES[0], name="late", needs=("order",), provides=("late",))
    with raises(InternalError):
        check_order((*PASSES[:place], late, *PASSES[place:]), EVERYTHING, LOWERING_NEEDS)


def test_what_a_budget_asks_for_runs_last_and_only_then():
    names = [step.name for step in check_order(PASSES, EVERYTHING, LOWERING_NEEDS)]
    assert names[-6:] == ["buckets", "feed", "recompute", "offload", "spill", "merge_updates"]
    plain = replace(EVERYTHING, memory_budget=0)
    assert [step.name for step in check_order(PASSES, plain, LOWERING_NEEDS)] == [
        *names[:-4],
        names[-1],
    ]


def test_intervals_that_coincide_too_seldom_are_refused_in_the_users_words(sketch, fake_target):
    x, w = sketch.input("x", (8, 8), "float32"), sketch.variable("w", (8, 8), "float32")
    total = sketch.b.emit_one(SUM, sketch.b.emit_one(MATMUL, x, w), axes=(0, 1), keepdims=False)
    sketch.b.outputs = [Output("y", total)]
    seldom = CompileOptions("job", is_training=False, snapshot_every=7919, metrics_every=6007)
    with raises(CompileError):
        compile_graph(sketch.b.freeze(), fake_target, seldom)


def test_a_broken_graph_is_shown_around_the_node_that_breaks_it(sketch):
    x = sketch.input("x", (2, 2))
    for _ in range(20):
        x = sketch.b.emit_one(MATMUL, x, x)
    graph = sketch.b.freeze()
    nodes = list(graph.nodes)
    nodes[10] = replace(nodes[10], inputs=(nodes[12].outputs[0],) * 2)
    with pytest.raises(InternalError) as caught:
        check(replace(graph, nodes=tuple(nodes)), "swap")
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("after swap: matmul at ")
    assert first.endswith(f"reads value {nodes[12].outputs[0]} before it is produced")
    shown = [line.partition(":")[0] for line in lines[:15]]
    assert shown == [f"{'>' if i == 10 else ' '} %{nodes[i].outputs[0]}" for i in range(3, 18)]
