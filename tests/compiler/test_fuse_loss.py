import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.attrs import Attrs
from compiler.graph import Output, SourceLocation, UpdateRule
from compiler.ops.binary import ADD, MUL
from compiler.ops.linear_loss import LINEAR_CROSS_ENTROPY
from compiler.ops.loss import CROSS_ENTROPY
from compiler.ops.matmul import MATMUL
from compiler.ops.reduce import ARGMAX
from compiler.ops.shape import RESHAPE, TRANSPOSE
from compiler.ops.update import SGD_UPDATE
from compiler.passes import autodiff, fuse_loss
from compiler.passes.check import check
from compiler.passes.fuse_loss import MIN_LOGITS_BYTES, MOST_CHUNK_BYTES, choose_chunk_rows
from compiler.prune import prune
from compiler.types import DType, TensorType

BATCH, TOKENS, WIDTH, CLASSES = 2, 3, 4, 5
ROWS = BATCH * TOKENS


def fused(graph, chunk_rows=4):
    """Run the pass without a limit, and drop what it left unused."""
    return prune(check(fuse_loss.run(graph, 0, chunk_rows), "fuse_loss"))


def ops_of(graph):
    return [str(node.op) for node in graph.nodes]


def reshape(s, value, *shape):
    return s.b.one(RESHAPE, value, shape=shape)


def rows_of(s):
    return reshape(s, s.input("x", (BATCH, TOKENS, WIDTH)), ROWS, WIDTH)


def product(s, rows):
    weight = s.variable("weight", (CLASSES, WIDTH))
    return s.b.one(MATMUL, rows, s.b.one(TRANSPOSE, weight, perm=(1, 0)))


def bias(s):
    return s.variable("bias", (CLASSES,))


def there_and_back(s, logits):
    return reshape(s, reshape(s, logits, BATCH, TOKENS, CLASSES), ROWS, CLASSES)


def loss_of(s, logits):
    labels = reshape(s, s.input("y", (BATCH, TOKENS), "int64"), ROWS)
    with s.b.at("head", SourceLocation("train.py", 41)):
        return s.b.emit(CROSS_ENTROPY, (logits, labels))


def plain(s):
    return product(s, rows_of(s))


def without_bias(s):
    return there_and_back(s, plain(s))


def with_bias(s):
    return there_and_back(s, s.b.one(ADD, plain(s), bias(s)))


def with_bias_first(s):
    return s.b.one(ADD, bias(s), plain(s))


def with_bias_on_tokens(s):
    tokens = reshape(s, plain(s), BATCH, TOKENS, CLASSES)
    return reshape(s, s.b.one(ADD, tokens, bias(s)), ROWS, CLASSES)


def with_products_of_tokens(s):
    logits = product(s, s.input("x", (BATCH, TOKENS, WIDTH)))
    return reshape(s, s.b.one(ADD, logits, bias(s)), ROWS, CLASSES)


def with_classes_in_columns(s):
    return s.b.one(MATMUL, rows_of(s), s.variable("weight", (WIDTH, CLASSES)))


FUSED = (
    plain, without_bias, with_bias, with_bias_first, with_bias_on_tokens, with_products_of_tokens,
    with_classes_in_columns,
)  # fmt: skip


def feeds():
    rng = np.random.default_rng(5)
    return {
        "x": rng.normal(size=(BATCH, TOKENS, WIDTH)),
        "y": rng.integers(0, CLASSES, (BATCH, TOKENS)),
        "weight": rng.normal(size=(CLASSES, WIDTH)),
        "bias": rng.normal(size=CLASSES),
        "extra": rng.normal(size=(ROWS, CLASSES)),
    }


def values_of(graph, evaluate):
    given = feeds()
    for node in graph.nodes:
        if node.attrs.get("shape") == (WIDTH, CLASSES):
            given["weight"] = given["weight"].T
    return evaluate(graph, given)


@pytest.mark.parametrize("build", FUSED, ids=lambda build: build.__name__)
def test_a_cross_entropy_of_a_linear_layer_computes_the_logits_itself(build, sketch, evaluate):
    loss, lse = loss_of(sketch, build(sketch))
    sketch.b.outputs = [Output("loss", loss), Output("lse", lse)]
    graph = sketch.b.freeze()
    after = fused(graph)
    assert not {"matmul", "add", "cross_entropy"} & set(ops_of(after))
    for name, value in values_of(graph, evaluate)[0].items():
        np.testing.assert_allclose(values_of(after, evaluate)[0][name], value, rtol=1e-12)


def test_the_new_node_has_the_line_and_the_scope_of_the_loss(sketch):
    loss, _ = loss_of(sketch, with_bias(sketch))
    sketch.b.outputs = [Output("loss", loss)]
    node = fused(sketch.b.freeze(), 2).nodes[-1]
    assert (node.op, node.scope, str(node.source)) == (LINEAR_CROSS_ENTROPY, "head", "train.py:41")
    assert node.attrs == Attrs({"chunk_rows": 2})


def scaled(s):
    return s.b.one(MUL, plain(s), s.constant(np.float64(0.5)))


def with_a_row_of_its_own_each(s):
    return s.b.one(ADD, plain(s), s.variable("extra", (ROWS, CLASSES)))


def with_two_biases(s):
    return s.b.one(ADD, s.b.one(ADD, plain(s), bias(s)), s.variable("second", (CLASSES,)))


def with_itself_as_bias(s):
    row = reshape(s, product(s, s.input("row", (1, WIDTH))), CLASSES)
    return reshape(s, s.b.one(ADD, row, row), 1, CLASSES)


def with_a_stretched_row(s):
    row = product(s, s.input("row", (1, WIDTH)))
    return s.b.one(ADD, row, s.variable("rest", (ROWS, CLASSES)))


def with_a_stretched_column(s):
    column = s.b.one(MATMUL, rows_of(s), s.variable("weight", (WIDTH, 1)))
    return s.b.one(ADD, column, bias(s))


def with_classes_of_two_axes(s):
    heads = s.b.one(MATMUL, s.input("h", (ROWS, 5, 2)), s.variable("weight", (2, 1)))
    return reshape(s, heads, ROWS, 5)


def with_a_weight_per_batch(s):
    x, weight = s.input("x", (BATCH, TOKENS, WIDTH)), s.variable("w", (BATCH, WIDTH, CLASSES))
    return reshape(s, s.b.one(MATMUL, x, weight), ROWS, CLASSES)


KEPT = (
    scaled, with_a_row_of_its_own_each, with_two_biases, with_itself_as_bias, with_a_stretched_row,
    with_a_stretched_column,
    with_classes_of_two_axes, with_a_weight_per_batch,
)  # fmt: skip


@pytest.mark.parametrize("build", KEPT, ids=lambda build: build.__name__)
def test_logits_of_anything_else_stay(build, sketch):
    logits = build(sketch)
    labels = sketch.input("labels", sketch.b.type_of(logits).shape[:1], "int64")
    sketch.b.outputs = [Output("loss", sketch.b.emit(CROSS_ENTROPY, (logits, labels))[0])]
    graph = sketch.b.freeze()
    assert fuse_loss.run(graph, 0) is graph


def test_logits_that_the_job_returns_stay(sketch):
    logits = with_bias(sketch)
    loss, _ = loss_of(sketch, logits)
    sketch.b.outputs = [Output("loss", loss), Output("logits", logits)]
    graph = sketch.b.freeze()
    assert fuse_loss.run(graph, 0) is graph


def test_logits_that_an_accuracy_reads_stay_on_whatever_way_it_reads_them(sketch):
    rows = plain(sketch)
    loss, _ = loss_of(sketch, there_and_back(sketch, rows))
    best = sketch.b.one(ARGMAX, rows, axis=1, keepdims=False)
    sketch.b.outputs = [Output("loss", loss), Output("best", best)]
    graph = sketch.b.freeze()
    assert fuse_loss.run(graph, 0) is graph


def test_small_logits_stay_and_large_ones_go(sketch):
    loss, _ = loss_of(sketch, with_bias(sketch))
    sketch.b.outputs = [Output("loss", loss)]
    graph = sketch.b.freeze()
    size = ROWS * CLASSES * 8
    assert fuse_loss.run(graph) is graph
    assert fuse_loss.run(graph, size) is graph
    assert "cross_entropy" not in ops_of(fuse_loss.run(graph, size - 1))


def test_each_of_two_losses_gets_its_own_layer_and_others_keep_theirs(sketch, evaluate):
    first, _ = loss_of(sketch, plain(sketch))
    second, _ = loss_of(sketch, scaled(sketch))
    third, _ = loss_of(sketch, with_bias(sketch))
    sketch.b.outputs = [Output(n, v) for n, v in (("a", first), ("b", second), ("c", third))]
    graph = sketch.b.freeze()
    after = fused(graph)
    assert ops_of(after).count("linear_cross_entropy") == 2
    assert ops_of(after).count("cross_entropy") == 1
    for name, value in values_of(graph, evaluate)[0].items():
        np.testing.assert_allclose(values_of(after, evaluate)[0][name], value, rtol=1e-12)


def test_the_rewritten_job_has_the_updates_of_the_job(sketch, evaluate):
    loss, _ = loss_of(sketch, with_bias(sketch))
    sketch.b.objective = loss
    sketch.b.outputs = [Output("loss", loss)]
    rate, attrs = sketch.constant(np.float64(0.5)), Attrs({"weight_decay": 0.0})
    parameters = [node.outputs[0] for node in sketch.b.nodes if node.attrs.get("role")]
    sketch.b.updates = [UpdateRule(SGD_UPDATE, v, (), (rate,), attrs) for v in parameters]
    graph = sketch.b.freeze()
    after = autodiff.run(fused(graph))
    assert "linear_cross_entropy_grad" in ops_of(check(after, "autodiff"))
    expected = values_of(autodiff.run(graph), evaluate)[1]
    got = values_of(after, evaluate)[1]
    assert got.keys() == {"weight", "bias"} == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


@given(
    st.integers(1, 10**6), st.integers(1, 10**7), st.sampled_from([DType.FLOAT32, DType.FLOAT64])
)
def test_chunks_are_even_no_larger_than_allowed_and_of_rows_enough(rows, classes, dtype):
    chunk = choose_chunk_rows(TensorType(dtype, (rows, classes)))
    row_bytes = classes * dtype.itemsize
    assert 1 <= chunk <= rows
    assert chunk == 1 or chunk * row_bytes <= MOST_CHUNK_BYTES
    num_chunks = -(-rows // chunk)
    assert num_chunks * chunk - rows < num_chunks
    if num_chunks > 1:
        assert 2 * chunk >= min(512, MOST_CHUNK_BYTES // row_bytes)


def test_a_chunk_of_gpt2s_logits_is_a_thirty_third():
    logits = TensorType(DType.FLOAT32, (8192, 50257))
    assert logits.size_bytes > 100 * MIN_LOGITS_BYTES
    assert choose_chunk_rows(logits) == 249
