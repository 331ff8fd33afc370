import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError
from compiler.contract.types import DType, TensorType


class Model(nn.Module):
    def __init__(self):
        self.emb = nn.Embedding(10, 8)
        self.blocks = [nn.TransformerBlock(8, heads=2) for _ in range(2)]
        self.heads = {"a": nn.Linear(8, 3), "b": nn.Linear(8, 3, bias=False)}


@pytest.mark.parametrize(
    ("path", "array"),
    [
        ("emb.weight", np.zeros((9, 8), np.float32)),
        ("blocks.1.attn.qkv.weight", np.zeros((24, 8), np.int32)),
        ("blocks.0.norm1.weight", np.full(8, 1e300)),
        ("blocks.0.norm2.weight", np.ma.zeros(8, dtype=np.float32)),
        ("blocks.0.mlp.up.weight", np.zeros((8, 32), np.float32)),
        ("heads.a.bias", [0.0, 0.0, 0.0]),
        ("heads.b.weight", np.float32(1.0)),
        ("seen", np.zeros((), np.float32)),
        ("seen", np.zeros((), np.uint64)),
    ],
)
def test_what_does_not_fit_is_named_by_its_path_and_nothing_is_loaded(path, array):
    model = Model()
    model.seen = nn.Buffer((), dtype="int64")
    own = {name: np.ones(s.type.shape, s.type.dtype.value) for name, s in model.named_stored()}
    model.load(own)
    with raises(CompileError):
        model.load({**own, "emb.weight": np.zeros((10, 8), np.float32), path: array})
    assert {float(a.min()) for a in model.state().values()} == {1.0}


def test_parameters_are_named_by_path_in_order_of_assignment():
    names = [name for name, _ in Model().named_parameters()]
    assert names[0] == "emb.weight"
    assert "blocks.1.attn.qkv.weight" in names
    assert names[-3:] == ["heads.a.weight", "heads.a.bias", "heads.b.weight"]
    assert len(names) == len(set(names))


def test_a_shared_parameter_counts_once_under_its_first_path():
    class Tied(nn.Module):
        def __init__(self):
            self.emb = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.emb.weight

    assert [n for n, _ in Tied().named_parameters()] == ["emb.weight"]
    assert Tied().num_parameters() == 80


@pytest.mark.parametrize(
    "heads",
    [
        {1: nn.Linear(2, 2), "1": nn.Linear(2, 2)},
        {"a.b": nn.Linear(2, 2), "a": {"b": nn.Linear(2, 2)}},
        {"0.weight": nn.LayerNorm(2).weight, 0: nn.LayerNorm(2)},
    ],
)
def test_two_parts_under_one_path_are_an_error_that_names_both(heads):
    class Keeps(nn.Module):
        def __init__(self):
            self.heads = heads

    for walk in (Keeps().named_parameters, Keeps().num_parameters, Keeps().named_modules):
        with raises(CompileError):
            list(walk())


def test_one_part_under_two_keys_of_one_path_is_shared_and_no_error():
    model, layer = nn.Module(), nn.Linear(2, 2)
    model.heads = {1: layer, "1": layer, 2: "no part", "2": nn.LayerNorm(2)}
    names = [name for name, _ in model.named_parameters()]
    assert names == ["heads.1.weight", "heads.1.bias", "heads.2.weight", "heads.2.bias"]
    assert [path for path, _ in model.named_modules()] == ["", "heads.1", "heads.2"]


def test_a_list_that_holds_itself_is_walked_over_once():
    model = nn.Module()
    model.parts = [nn.LayerNorm(2)]
    model.parts.append(model.parts)
    assert [name for name, _ in model.named_parameters()] == ["parts.0.weight", "parts.0.bias"]
    assert "parts.0: LayerNorm" in repr(model)


def test_the_char_gpt_of_the_readme_has_the_promised_number_of_parameters():
    class CharLM(nn.Module):
        def __init__(self, d=128):
            self.emb, self.pos = nn.Embedding(128, d), nn.Embedding(64, d)
            self.blocks = [nn.TransformerBlock(d, heads=4, causal=True) for _ in range(2)]
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 128)

    assert CharLM().num_parameters() == 437_888


def test_loading_is_strict_about_names_shapes_and_dtypes():
    model = nn.Linear(2, 3)
    good = {"weight": np.ones((3, 2), np.float32), "bias": np.zeros(3, np.float32)}
    model.load(good)
    np.testing.assert_array_equal(model.state()["weight"], good["weight"])
    with raises(CompileError):
        model.load({"weight": good["weight"]})
    with raises(CompileError):
        model.load({**good, "extra": good["bias"]})
    with raises(CompileError):
        model.load({**good, "weight": np.ones((3, 2), bool)})


def test_an_array_that_nobody_can_write_into_is_taken_and_any_other_copied():
    layer, weight, bias = nn.Linear(2, 3), np.ones((3, 2), np.float32), np.zeros(3, np.float32)
    weight.flags.writeable = False
    layer.load({"weight": weight, "bias": bias})
    bias[:] = 5
    assert layer.weight.data is weight
    np.testing.assert_array_equal(layer.bias.data, [0, 0, 0])
    window = np.ones((2, 3, 2), np.float32)[1]
    window.flags.writeable = False  # what it shows can be written all the same
    layer.weight.data = window
    assert not np.shares_memory(layer.weight.data, window)


@pytest.mark.parametrize("came", [3, [1.0, 2.0], None])
def test_what_is_no_array_is_no_value_of_a_parameter(came):
    layer = nn.Linear(2, 1)
    with raises(CompileError):
        layer.bias.data = came
    with raises(CompileError):
        layer.load(came)


def test_a_model_that_is_read_before_any_run_has_the_first_values_of_that_run():
    @af.job(train=False)
    def job(model, batch):
        return {"y": model(batch.x)}

    read, run = nn.Linear(2, 3), nn.Linear(2, 3)
    x = np.eye(2, dtype=np.float32)
    weight, bias = read.state().values()
    np.testing.assert_allclose(job.step(run, {"x": x})["y"], x @ weight.T + bias, rtol=1e-6)
    assert run.state()["weight"].tobytes() == weight.tobytes()
    assert nn.Linear(2, 3).init(0).state()["weight"].tobytes() == weight.tobytes()


def test_a_seed_of_its_own_or_of_the_process_decides_the_first_values():
    def weight(model):
        return model.state()["weight"].tobytes()

    default, one = weight(nn.Linear(2, 3)), weight(nn.Linear(2, 3).init(1))
    assert default != one
    af.seed(1)
    try:
        assert weight(nn.Linear(2, 3)) == one
        assert weight(nn.Linear(2, 3).init(0)) == default
        trained = nn.Linear(2, 3)
        step = af.job(lambda m, b: m(b.x).sum(), optimizer=af.optim.SGD(0.0))
        step.step(trained, {"x": np.ones((1, 2), np.float32)})
        assert weight(trained) == one
    finally:
        af.seed(0)


def test_what_has_values_is_not_given_first_ones():
    model = nn.BatchNorm1d(2).init(3)  # whose buffers have values from the start
    with raises(CompileError):
        model.init(3)
    loaded = nn.Linear(2, 3)
    loaded.bias.data = np.ones(3, np.float32)
    with raises(CompileError):
        loaded.init()
    np.testing.assert_array_equal(loaded.state()["bias"], [1, 1, 1])
    for wrong in (-1, 1.5, 1 << 63):
        with raises(CompileError):
            nn.Linear(2, 3).init(wrong)
        with raises(CompileError):
            af.seed(wrong)


def test_nodes_know_the_module_they_were_made_in(traced):
    class Outer(nn.Module):
        def __init__(self):
            self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x + 1.0

    model = Outer()
    graph = traced(model, model, x=(2, 4))
    scopes = [n.scope for n in graph.nodes if n.op.name in ("matmul", "add")]
    assert scopes == ["layers.0", "layers.0", "layers.1", "layers.1", ""]


def test_attention_is_causal_and_matches_the_textbook(traced, evaluate):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 5, 3)).astype(np.float32) for _ in range(3))
    graph = traced(
        lambda q, k, v: af.attention(q, k, v, causal=True), q=q.shape, k=k.shape, v=v.shape
    )
    scores = np.einsum("btd,bsd->bts", q, k) / np.sqrt(3)
    scores[:, np.triu(np.ones((5, 5), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(evaluate(graph, q=q, k=k, v=v), weights @ v, rtol=1e-5)


def test_multi_head_attention_equals_heads_computed_one_by_one(traced, evaluate):
    layer = nn.Attention(6, heads=3)
    graph = traced(layer, layer, x=(2, 4, 6))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 4, 6)).astype(np.float32)
    w = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in layer.named_parameters()}
    got = evaluate(graph, x=x, **{n.replace(".", "_"): a for n, a in w.items()})
    q, k, v = np.split(x @ w["qkv.weight"].T + w["qkv.bias"], 3, axis=-1)
    heads = []
    for h in range(3):
        part = slice(2 * h, 2 * h + 2)
        s = np.exp(q[..., part] @ k[..., part].transpose(0, 2, 1) / np.sqrt(2))
        heads.append(s / s.sum(-1, keepdims=True) @ v[..., part])
    expected = np.concatenate(heads, -1) @ w["proj.weight"].T + w["proj.bias"]
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


def test_dropout_is_the_identity_outside_training(traced):
    drop = nn.Dropout(0.5)
    assert "dropout" in [n.op.name for n in traced(drop, drop, x=(4,)).nodes]
    assert "dropout" not in [n.op.name for n in traced(drop, drop, x=(4,), is_training=False).nodes]


def test_every_dropout_of_a_model_has_a_key_of_its_own(traced):
    a, b = nn.Dropout(0.5), nn.Dropout(0.5)
    graph = traced(lambda x: a(b(x)) + a(x), x=(4,))
    keys = [n.attrs["key"] for n in graph.nodes if n.op.name == "dropout"]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Attention(10, heads=3),
        lambda: nn.Module()(),
        lambda: nn.Linear(0, 2),
        lambda: nn.Linear(-1, 2),
        lambda: nn.Linear(2, 0),
        lambda: nn.Linear(2.0, 2),
        lambda: nn.Linear(2, "3"),
        lambda: nn.Embedding(0, 2),
        lambda: nn.Embedding(2, -1),
        lambda: nn.Embedding(2, 2, std="a"),
        lambda: nn.Embedding(2, 2, std=-1.0),
        lambda: nn.LayerNorm(0),
        lambda: nn.LayerNorm(2.5),
        lambda: nn.LayerNorm(2, eps="a"),
        lambda: nn.Dropout("a"),
        lambda: nn.Dropout(1.5),
    ],
)
def test_wrong_modules_are_errors(make):
    with raises(CompileError):
        make()


def test_layers_take_numpy_integers_as_sizes(traced):
    two, three = np.array([2, 3])
    layer = nn.Linear(two, three)
    assert [p.shape for _, p in layer.named_parameters()] == [(3, 2), (3,)]
    assert all(type(n) is int for _, p in layer.named_parameters() for n in p.shape)
    block = nn.TransformerBlock(np.int64(4), heads=np.int64(2))
    graph = traced(block, block, x=(1, 3, 4))
    shapes = [n.attrs["shape"] for n in graph.nodes if n.op.name == "reshape"]
    assert all(type(n) is int for shape in shapes for n in shape)


def test_wrong_inputs_of_functions_name_what_was_expected(traced):
    labels = TensorType(DType.INT32, (3,))
    with raises(CompileError):
        traced(lambda x, y: af.cross_entropy(x, y), x=(2, 5), y=labels)
    layer = nn.Linear(4, 2)
    with raises(CompileError):
        traced(layer, layer, x=(2, 5))
    with raises(CompileError):
        traced(lambda x: af.dropout(x, 1.5), x=(2,))


def test_a_parameter_of_another_model_is_refused_with_the_line_that_made_it(traced):
    stranger = nn.Linear(4, 4)
    with raises(CompileError):
        traced(stranger, nn.Linear(1, 1), x=(2, 4))


def test_a_model_is_shown_as_a_tree_with_settings_types_and_what_is_shared():
    class Net(nn.Module):
        def __init__(self):
            self.width, self.names = 4, {"first": "up"}
            self.blocks = [nn.Linear(4, 4), nn.LayerNorm(4)]
            self.twin = self.blocks[0]
            self.tied = self.blocks[1].weight
            self.blocks[0].weight.freeze()

        def __call__(self, x):
            return x

    assert repr(Net()).splitlines() == [
        "Net(width=4, names.first='up', tied float32[4] (shared))",
        "  blocks.0: Linear(weight float32[4, 4] frozen, bias float32[4])",
        "  blocks.1: LayerNorm(normalized_shape.0=4, eps=1e-05, weight float32[4],"
        " bias float32[4])",
        "  twin: Linear (shared)",
        "28 parameters",
    ]


def test_a_module_that_holds_itself_can_be_shown():
    net = nn.Module()
    net.me = net
    assert repr(net).splitlines() == ["Module()", "  me: Module (shared)", "0 parameters"]
