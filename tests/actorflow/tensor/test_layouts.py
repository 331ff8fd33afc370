"""What a user says of ranks: meshes, layouts of parameters, and what cannot be."""

import copy
import pickle

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from actorflow.tensor.layouts import MOST_RANKS
from compiler.contract.placement import Mesh
from compiler.ops.primitives.body import hash_graph
from compiler.ops.primitives.sources import VARIABLE

BATCH = {"x": af.TensorType(af.DType.FLOAT32, (8, 4))}
MESH = af.Mesh(data=2, model=2)


def graph_of(model, mesh=MESH, function=lambda model, batch: model(batch.x)):
    return af.job(train=False, mesh=mesh)(function).graph(model, BATCH)


def layouts(graph):
    """Return what the variables of a graph have of layouts, by name."""
    return {n.attrs["name"]: n.attrs.get("sbp", ()) for n in graph.nodes if n.op is VARIABLE}


def test_a_mesh_is_a_value_with_its_axes_in_the_order_given():
    assert af.Mesh(data=2, model=3) == Mesh(("data", "model"), (2, 3))
    assert af.Mesh(data=2, model=3) != af.Mesh(model=3, data=2)
    assert len({af.Mesh(data=2), af.Mesh(data=2), af.Mesh(data=3)}) == 2
    assert str(af.Mesh(data=2, model=2)) == "data=2 x model=2"
    assert copy.deepcopy(MESH) == pickle.loads(pickle.dumps(MESH)) == MESH


@pytest.mark.parametrize(
    ("axes", "launched", "shape"),
    [
        ({"data": -1}, None, (1,)),
        ({"data": -1}, "6", (6,)),
        ({"data": -1, "model": 2}, "6", (3, 2)),
        ({"stage": 2, "data": -1, "model": 2}, "4", (2, 1, 2)),
    ],
)
def test_one_axis_of_a_mesh_may_have_the_ranks_that_are_left(axes, launched, shape, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    assert af.Mesh(**axes) == Mesh(tuple(axes), shape)


@pytest.mark.parametrize(
    ("axes", "launched"),
    [
        ({"data": -1, "model": -1}, "4"),
        ({"data": -1, "model": 2}, "3"),
        ({"data": -1}, "0"),
        ({"data": -1}, "four"),
        ({"data": -2}, "4"),
    ],
    ids=["two", "odd", "none", "text", "below"],
)
def test_ranks_that_are_left_and_make_no_mesh_are_refused(axes, launched, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", launched)
    with raises(af.CompileError):
        af.Mesh(**axes)


def test_split_of_an_axis_alone_is_a_word_and_of_a_tensor_cuts_it(traced):
    assert str(af.split(0)) == str(af.split(np.int64(0))) == "S(0)"
    graph = traced(lambda x: af.split(x, 2)[1] + af.split(x, split_size=[2, 2], axis=0)[0], x=(4,))
    assert graph.types[graph.outputs[0].value].shape == (2,)
    with raises(TypeError):
        traced(lambda x: af.split(x), x=(4,))
    with raises(af.CompileError):
        af.split("rows")


@pytest.mark.parametrize(
    "made",
    [
        lambda: af.Mesh(),
        lambda: af.Mesh(2, 2),
        lambda: af.Mesh(data=0),
        lambda: af.Mesh(data=2.0),
        lambda: af.Mesh(data=True),
        lambda: af.Mesh(**{"": 2}),
        lambda: af.Mesh(**{"da ta": 2}),
        lambda: af.split(),
        lambda: nn.LayerNorm(8, sbp={"model": af.split(0)}),
        lambda: nn.Conv2d(3, 8, 3, sbp={"model": "B"}),
        lambda: nn.GroupNorm(2, 4, sbp={"model": "B"}),
        lambda: nn.GRU(2, 4, sbp={"model": "B"}),
        lambda: af.Mesh(a=MOST_RANKS, b=2),
        lambda: af.job(mesh=(2, 2), train=False)(print),
        lambda: af.job(zero=1, train=False)(print),
        lambda: af.job(zero=True, train=False, mesh=MESH)(print),
        lambda: af.job(zero=True, optimizer=af.optim.SGD(1.0))(print),
        lambda: af.job(zero=True, optimizer=af.optim.SGD(1.0), mesh=af.Mesh(model=2))(print),
        lambda: nn.Linear(4, 8, sbp=af.split(0)),
        lambda: nn.Linear(4, 8, sbp={0: af.split(0)}),
        lambda: nn.Linear(4, 8, sbp={"model": 0}),
        lambda: nn.Linear(4, 8, sbp={"model": "S"}),
        lambda: nn.Linear(4, 8, sbp={"model": af.partial}),
        lambda: nn.Linear(4, 8, bias=False, sbp={"bias": {"model": "B"}}),
        lambda: nn.Linear(4, 8, sbp={"weight": {"model": "B"}, "model": "B"}),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(made):
    with raises(af.CompileError):
        made()


@pytest.mark.parametrize("name", ["broadcast", "partial"])
def test_a_word_without_brackets_says_so_where_it_is_called(name):
    with raises(af.CompileError):
        getattr(af, name)(0)


@pytest.mark.parametrize(
    ("sbp", "weight", "bias"),
    [
        ({"model": af.split(0)}, (("model", "S(0)"),), (("model", "S(0)"),)),
        ({"model": af.split(1)}, (("model", "S(1)"),), (("model", "B"),)),
        ({"model": af.split(-1)}, (("model", "S(1)"),), (("model", "B"),)),
        ({"model": af.split(-2)}, (("model", "S(0)"),), (("model", "S(0)"),)),
        ({"model": "S(0)"}, (("model", "S(0)"),), (("model", "S(0)"),)),
        (
            {"model": af.split(0), "data": af.broadcast},
            (("data", "B"), ("model", "S(0)")),
            (("data", "B"), ("model", "S(0)")),
        ),
        ({"weight": {"model": af.split(0)}}, (("model", "S(0)"),), ()),
        (
            {"bias": {"model": "B"}, "weight": {"data": "S(1)"}},
            (("data", "S(1)"),),
            (("model", "B"),),
        ),
        ({}, (), ()),
    ],
)
def test_variables_have_the_layout_of_their_parameter(sbp, weight, bias):
    found = layouts(graph_of(nn.Linear(4, 8, sbp=sbp)))
    assert found == {"weight": weight, "bias": bias}


def test_a_model_shows_its_layouts():
    shown = repr(nn.Linear(4, 8, sbp={"model": af.split(1), "data": "B"}))
    assert "weight float32[8, 4] model=S(1) data=B, bias float32[8] model=B data=B" in shown


def test_a_copy_of_a_layer_lies_as_the_layer_does():
    stack = nn.ModuleList([nn.Linear(4, 4, sbp={"model": af.split(0)})])
    stack.append(copy.deepcopy(stack[0]))
    found = layouts(graph_of(stack, function=lambda m, batch: m[1](m[0](batch.x))))
    assert set(found.values()) == {(("model", "S(0)"),)}


def test_an_embedding_is_split_by_rows_or_columns():
    def rows(model, batch):
        return model((batch.x[:, 0] * 0).to("int32"))

    found = graph_of(nn.Embedding(5, 6, sbp={"model": af.split(1)}), function=rows)
    assert layouts(found) == {"weight": (("model", "S(1)"),)}


def attention(batch_first=True, heads=2, **options):
    model = nn.MultiheadAttention(4, heads, batch_first=batch_first, **options)

    def job(model, batch):
        x = batch.x.unsqueeze(0)
        return model(x, x, x, need_weights=False)[0]

    return model, job


def test_attention_gives_ranks_heads_of_their_own():
    rows, columns = (("model", "S(0)"),), (("model", "S(1)"),)
    model, job = attention(sbp={"model": af.split(0)})
    assert layouts(graph_of(model, function=job)) == {
        "q_proj_weight": rows,
        "k_proj_weight": rows,
        "v_proj_weight": rows,
        "in_proj_bias": (),
        "out_proj.weight": columns,
        "out_proj.bias": (("model", "B"),),
    }
    model, job = attention(sbp={"model": af.broadcast})
    whole = layouts(graph_of(model, function=job))
    assert whole["out_proj.weight"] == whole["q_proj_weight"] == (("model", "B"),)


def test_projections_apart_are_those_of_one_weight(evaluate):
    (whole, job), (apart, _) = attention(), attention(sbp={"model": af.split(0)})
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 4))
    shared = {
        "in_proj_bias": rng.normal(size=12),
        "out_proj_weight": rng.normal(size=(4, 4)),
        "out_proj_bias": rng.normal(size=4),
        "x": rng.normal(size=(8, 4)),
    }
    one = evaluate(graph_of(whole, None, job), in_proj_weight=np.concatenate([q, k, v]), **shared)
    weights = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    np.testing.assert_allclose(evaluate(graph_of(apart, None, job), **weights, **shared), one)


FIRST = {"q", "k", "v", "up", "gate_proj", "up_proj", "linear1"}
FIRST |= {"q_proj_weight", "k_proj_weight", "v_proj_weight"}
LAST = {"proj", "down", "down_proj", "linear2", "out_proj"}
HEADS = {"model": af.split(0)}
BLOCKS = {
    "Attention": lambda sbp: nn.Attention(4, heads=4, sbp=sbp),
    "MLP": lambda sbp: nn.MLP(4, sbp=sbp),
    "SwiGLU": lambda sbp: nn.SwiGLU(4, 8, bias=True, sbp=sbp),
    "TransformerBlock": lambda sbp: nn.TransformerBlock(4, heads=4, causal=True, sbp=sbp),
    "TransformerEncoderLayer": lambda sbp: nn.TransformerEncoderLayer(4, 4, 8, 0.0, sbp=sbp),
    "TransformerDecoderLayer": lambda sbp: nn.TransformerDecoderLayer(4, 4, 8, 0.0, sbp=sbp),
}


def of_block(name):
    """Return a job that calls a block on [8, 1, 4]."""

    def job(model, batch):
        x = batch.x.unsqueeze(1)
        return model(x, x) if "Decoder" in name else model(x)

    return job


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_cut_where_it_begins_and_where_it_ends(name):
    found = layouts(graph_of(BLOCKS[name](HEADS), function=of_block(name)))
    for path, sbp in found.items():
        layers, is_bias = set(path.split(".")), path.endswith("bias")
        if layers & FIRST:
            assert sbp == (("model", "S(0)"),), path
        elif layers & LAST:
            assert sbp == (("model", "B" if is_bias else "S(1)"),), path
        else:
            assert sbp == (), path
            assert "norm" in path or path.endswith("in_proj_bias")


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_shares_by_its_first_axis_alone(name):
    with raises(af.CompileError):
        BLOCKS[name]({"model": af.split(1)})


@pytest.mark.parametrize("name", ["Attention", "TransformerBlock", "TransformerEncoderLayer"])
def test_no_head_lies_on_two_ranks(name):
    with raises(af.CompileError):
        graph_of(BLOCKS[name](HEADS), af.Mesh(data=2, model=3), of_block(name))


def test_attention_of_three_projections_is_that_of_one(evaluate):
    rng = np.random.default_rng(0)
    weights, biases = rng.normal(size=(3, 4, 4)), rng.normal(size=(3, 4))
    shared = {
        "x": rng.normal(size=(8, 4)),
        "proj_weight": rng.normal(size=(4, 4)),
        "proj_bias": rng.normal(size=4),
    }
    packed = {"qkv_weight": weights.reshape(12, 4), "qkv_bias": biases.reshape(12)}
    apart = {f"{n}_weight": w for n, w in zip("qkv", weights, strict=True)}
    apart |= {f"{n}_bias": bias for n, bias in zip("qkv", biases, strict=True)}

    def job(model, batch):
        return model(batch.x.reshape(2, 4, 4))

    one = evaluate(graph_of(nn.Attention(4, heads=2), None, job), **packed, **shared)
    three = evaluate(graph_of(nn.Attention(4, heads=2, sbp=HEADS), None, job), **apart, **shared)
    np.testing.assert_allclose(three, one, rtol=1e-12)


def test_a_parameter_of_ones_own_says_its_layout_and_another_later():
    class Scale(nn.Module):
        def __init__(self):
            self.scale = nn.Parameter((8, 4), (("kind", "ones"),), sbp={"data": "S(0)"})

        def __call__(self, x):
            return x * self.scale

    model = Scale()
    job = af.job(train=False, mesh=MESH)(lambda model, batch: model(batch.x))
    assert layouts(job.graph(model, BATCH)) == {"scale": (("data", "S(0)"),)}
    assert model.scale.sbp == {"data": af.split(0)}
    model.scale.sbp = {"model": af.split(1)}
    assert layouts(job.graph(model, BATCH)) == {"scale": (("model", "S(1)"),)}


@pytest.mark.parametrize("mesh", [None, af.Mesh(data=1, model=1), af.Mesh(data=1)])
def test_one_rank_takes_no_notice_of_layouts(mesh):
    plain = graph_of(nn.Linear(4, 8), None)
    split = graph_of(nn.Linear(4, 8, sbp={"model": af.split(0)}), mesh)
    assert hash_graph(split) == hash_graph(plain)
    assert [n.attrs for n in split.nodes] == [n.attrs for n in plain.nodes]


def test_an_axis_of_one_rank_leaves_whole_what_is_split_along_it():
    found = layouts(graph_of(nn.Linear(4, 8, sbp=HEADS), af.Mesh(data=2, model=1)))
    assert found == {"weight": (), "bias": ()}


@pytest.mark.parametrize(
    ("mesh", "sbp"),
    [
        (af.Mesh(data=2), {"model": af.split(0)}),
        (af.Mesh(stage=2), {"stage": af.split(0)}),
        (MESH, {"weight": {"model": af.split(2)}}),
        (MESH, {"weight": {"model": af.split(-3)}}),
        (MESH, {"bias": {"model": af.split(1)}}),
        (af.Mesh(data=2, model=5), {"weight": {"model": af.split(1)}}),
        (af.Mesh(data=4, model=3), {"model": af.split(0), "data": af.split(0)}),
    ],
)
def test_a_layout_that_a_mesh_cannot_have_is_refused_with_the_line_that_gave_it(mesh, sbp):
    model = nn.Linear(4, 8, sbp=sbp)
    with raises(af.CompileError):
        graph_of(model, mesh)


def layouts_of_steps(graph):
    """Return the layouts of inputs and of values that a job gives some, in order."""
    kept = [n for n in graph.nodes if n.op.name in ("input", "to_sbp")]
    return [(n.op.name, n.attrs.get("sbp", ())) for n in kept]


def test_a_tensor_is_laid_out_by_keywords_or_a_mapping():
    def job(model, batch):
        h = (batch.x * 2).to_sbp(model=af.split(-1), data="S(0)")
        return h.to_sbp({"data": af.partial}).to_sbp(model=af.broadcast)

    assert layouts_of_steps(graph_of(nn.Module(), function=job)) == [
        ("input", ()),
        ("to_sbp", (("data", "S(0)"), ("model", "S(1)"))),
        ("to_sbp", (("data", "P"),)),
        ("to_sbp", (("model", "B"),)),
    ]


def test_a_batch_comes_as_its_first_layout_says():
    def job(model, batch):
        whole = batch.x.to_sbp(data="B")
        return whole + batch["x"].to_sbp(data=af.split(1)) + batch.x.to_sbp(model=af.partial)

    first, *others = layouts_of_steps(graph_of(nn.Module(), function=job))
    assert first == ("input", (("data", "B"),))
    assert [sbp for _, sbp in others] == [
        (("data", "B"),),
        (("data", "S(1)"),),
        (("model", "P"),),
    ]


def test_a_batch_is_given_in_parts_and_never_in_terms_of_a_sum():
    graph = graph_of(nn.Module(), function=lambda model, batch: batch.x.to_sbp(data=af.partial))
    assert layouts_of_steps(graph) == [("input", ()), ("to_sbp", (("data", "P"),))]


@pytest.mark.parametrize("mesh", [None, af.Mesh(data=1, model=1), af.Mesh(data=1)])
def test_one_rank_lays_nothing_out(mesh):
    def job(model, batch):
        return (batch.x.to_sbp(model=af.split(1)) * 2).to_sbp(model="B")

    plain = graph_of(nn.Module(), None, lambda model, batch: batch.x * 2)
    assert hash_graph(graph_of(nn.Module(), mesh, job)) == hash_graph(plain)


def test_gradients_go_through_a_layout():
    def job(model, batch):
        x = batch.x * 1
        return af.grad((x.to_sbp(model=af.split(1)) * x).sum(), x)

    graph = graph_of(nn.Module(), function=job)
    assert graph.types[graph.outputs[0].value].shape == (8, 4)


def of_x(function):
    """Return a job that does something with an entry of its batch."""
    return lambda model, batch: function(batch.x)


@pytest.mark.parametrize(
    "job",
    [
        of_x(lambda x: x.to_sbp()),
        of_x(lambda x: x.to_sbp({"model": "B"}, data="B")),
        of_x(lambda x: x.to_sbp(af.split(0))),
        of_x(lambda x: x.to_sbp(model=1)),
        of_x(lambda x: x.to_sbp(rows="B")),
        of_x(lambda x: x.to_sbp(model="S(2)")),
        of_x(lambda x: x.sum().to_sbp(model="S(0)")),
        of_x(lambda x: x[:1].to_sbp(data="S(0)")),
        of_x(lambda x: af.scan(lambda c, _: (c.to_sbp(data="S(0)"), None), x, length=2)[0]),
    ],
)
def test_a_tensor_that_cannot_lie_so_is_refused_with_the_line(job):
    with raises(af.CompileError):
        graph_of(nn.Module(), function=job)


def test_a_tensor_is_laid_out_inside_of_jobs_alone():
    with raises(af.CompileError):
        nn.Parameter((2,), (("kind", "ones"),)).to_sbp(model="B")
