from itertools import product

import numpy as np
import pytest

from actors.kernels import catalogue
from actors.kernels.interpret import logit_chunks
from actors.kernels.kernel import Operand
from compiler.types import DType, TensorType, contiguous_strides

FLAGS = ("dx", "dweight", "dbias")


def attrs(chunk_rows, *wanted):
    return {"chunk_rows": chunk_rows, **{name: name in wanted for name in FLAGS}}


def expected(x, weight, bias, labels, dloss):
    """Return loss, lse and the gradients of x, weight and bias in float64."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    logits = x @ weight.T + (0 if bias is None else bias.astype(np.float64))
    top = logits.max(axis=1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    rows = np.arange(len(x))
    dlogits = np.exp(logits - lse[:, None])
    dlogits[rows, labels] -= 1
    dlogits *= dloss / len(x)
    loss = (lse - logits[rows, labels]).mean()
    return loss, lse, (dlogits @ weight, dlogits.T @ x, dlogits.sum(axis=0))


class Problem:
    """Operands of one call, and the three kernels on them."""

    def __init__(self, harness, rows, width, classes, dtype="float32", bias=True, **layouts):
        rng = np.random.default_rng(rows * classes)
        self.harness, self.dtype = harness, dtype
        self.x = harness.strided(rng, (rows, width), dtype, layouts.get("x", "dense"))
        self.weight = harness.strided(rng, (classes, width), dtype, layouts.get("weight", "dense"))
        self.bias = rng.standard_normal(classes).astype(dtype) if bias else None
        self.labels = rng.integers(0, classes, rows)
        self.dloss = np.array(1.5, dtype)
        self.wanted = FLAGS if bias else FLAGS[:2]

    @property
    def operands(self):
        return tuple(a for a in (self.x, self.weight, self.bias) if a is not None)

    def call(self, name, attrs, inputs, shapes):
        return self.harness.call(name, attrs, inputs, [(shape, self.dtype) for shape in shapes])

    def loss(self, chunk_rows):
        inputs = (*self.operands, self.labels)
        return self.call("linear_cross_entropy", attrs(chunk_rows), inputs, ((), len(self.x)))

    def shapes(self, wanted):
        return [a.shape for a, name in zip(self.operands, FLAGS, strict=False) if name in wanted]

    def gradients(self, chunk_rows, lse, wanted=None):
        wanted = wanted or self.wanted
        inputs = (self.dloss, *self.operands, self.labels, lse)
        name = "linear_cross_entropy_grad"
        return self.call(name, attrs(chunk_rows, *wanted), inputs, self.shapes(wanted))

    def train(self, chunk_rows, wanted=None):
        wanted = wanted or self.wanted
        inputs = (self.dloss, *self.operands, self.labels)
        name = "linear_cross_entropy_train"
        return self.call(name, attrs(chunk_rows, *wanted), inputs, [(), *self.shapes(wanted)])

    def check(self, chunk_rows):
        loss, lse, gradients = expected(*self.operands[:2], self.bias, self.labels, 1.5)
        near = (
            {"rtol": 2e-5, "atol": 2e-6}
            if self.dtype == "float32"
            else {"rtol": 1e-10, "atol": 1e-12}
        )
        got_loss, got_lse = self.loss(chunk_rows)
        np.testing.assert_allclose(got_loss, loss, **near)
        np.testing.assert_allclose(got_lse, lse, **near)
        in_one_pass = self.train(chunk_rows)
        assert in_one_pass[0] == got_loss
        for got in (self.gradients(chunk_rows, got_lse), in_one_pass[1:]):
            for array, want in zip(got, gradients, strict=False):
                np.testing.assert_allclose(array, want, **near)
            assert len(got) == len(self.operands)


@pytest.fixture(params=[64, None], ids=["tiny-products", "usual-products"])
def product_bytes(request, monkeypatch):
    """Runs a test with products of a few classes as well, so that small weights have many."""
    if request.param is not None:
        monkeypatch.setattr(logit_chunks, "PRODUCT_BYTES", request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 100])
def test_loss_and_gradients_agree_with_float64(
    chunk_rows, dtype, bias, harness, block_bytes, product_bytes
):
    for extents in ((8, 5, 7), (9, 2, 30), (1, 1, 1), (4, 4, 4)):
        Problem(harness, *extents, dtype, bias).check(chunk_rows)


@pytest.mark.parametrize("weight", ["dense", "transposed", "sliced", "windowed", "broadcast"])
@pytest.mark.parametrize("x", ["dense", "transposed", "sliced", "broadcast"])
def test_operands_may_lie_in_any_way(x, weight, harness):
    Problem(harness, 10, 6, 9, x=x, weight=weight).check(4)


@pytest.mark.parametrize("label", ["int32", "uint8", "uint64"])
def test_labels_may_have_any_integer_type(label, harness):
    problem = Problem(harness, 10, 6, 9)
    problem.labels = problem.labels.astype(label)
    problem.check(4)


@pytest.mark.parametrize("offset", [-1e4, -100, 100, 1e4])
def test_loss_and_gradients_are_right_far_from_zero(offset, harness, block_bytes):
    problem = Problem(harness, 12, 4, 5, bias=False)
    problem.x[5:, 0] = offset
    problem.weight[:, 0] = 1.0
    loss, lse, gradients = expected(problem.x, problem.weight, None, problem.labels, 1.5)
    got = problem.loss(5)
    np.testing.assert_allclose(got[1], lse, rtol=1e-6)
    np.testing.assert_allclose(got[0], loss, atol=2e-3)
    for array, want in zip(problem.train(5)[1:], gradients[:2], strict=True):
        np.testing.assert_allclose(array, want, rtol=5e-3, atol=1e-4 * max(1, abs(offset)))


@pytest.mark.parametrize("offset", [0, 200])
def test_the_loss_of_training_has_the_bits_of_the_loss_alone(offset, harness):
    problem = Problem(harness, 37, 16, 130)
    problem.bias[:] += np.float32(offset)
    assert problem.train(8)[0] == problem.loss(8)[0]


def test_every_choice_of_gradients_has_the_bits_of_all_three(harness):
    problem = Problem(harness, 11, 3, 6)
    lse = problem.loss(4)[1]
    loss, *trained = problem.train(4)
    separate = problem.gradients(4, lse)
    for choice in product([True, False], repeat=3):
        wanted = [name for name, is_wanted in zip(FLAGS, choice, strict=True) if is_wanted]
        places = [place for place, is_wanted in enumerate(choice) if is_wanted]
        if not wanted:
            continue
        got_loss, *got = problem.train(4, wanted)
        assert got_loss == loss
        for place, array in zip(places, got, strict=True):
            np.testing.assert_array_equal(array, trained[place])
        for place, array in zip(places, problem.gradients(4, lse, wanted), strict=True):
            np.testing.assert_array_equal(array, separate[place])


def test_a_gradient_of_zero_gives_zeros_and_the_loss(harness):
    problem = Problem(harness, 6, 3, 5)
    problem.dloss = np.array(0, np.float32)
    loss, *gradients = problem.train(2)
    assert loss > 0
    assert not any(array.any() for array in gradients)


def test_a_row_that_is_not_a_number_spoils_its_own_dx_only(harness):
    problem = Problem(harness, 8, 3, 40)
    clean = problem.train(3)
    problem.x[4, 1] = np.nan
    loss, dx, *_ = problem.train(3)
    assert np.isnan(loss)
    others = [0, 1, 2, 3, 5, 6, 7]
    assert np.isnan(dx[4]).all()
    np.testing.assert_allclose(dx[others], clean[1][others], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["linear_cross_entropy_grad", "linear_cross_entropy_train"])
def test_dx_may_lie_over_x(name, harness):
    problem = Problem(harness, 11, 3, 6)
    has_loss = name.endswith("train")
    lse = problem.loss(4)[1]
    results = list(problem.train(4) if has_loss else problem.gradients(4, lse))
    x = problem.x.copy()
    inputs = (problem.dloss, x, *problem.operands[1:], problem.labels, *[lse][has_loss:])
    outputs = [x if i == has_loss else np.empty_like(a) for i, a in enumerate(results)]
    launch, needs, _ = harness.bind(name, attrs(4, *FLAGS), inputs, outputs)
    assert needs.in_place == ((int(has_loss), 1),)
    launch()
    for array, want in zip(outputs, results, strict=True):
        np.testing.assert_array_equal(array, want)


def test_dx_lies_nowhere_else_where_x_might_be_the_weight_too(harness):
    problem = Problem(harness, 6, 3, 6, bias=False)
    x = problem.x
    outputs = (np.empty((), np.float32), np.empty_like(x), np.empty_like(x))
    inputs = (problem.dloss, x, x, problem.labels)
    name = "linear_cross_entropy_train"
    _, needs, _ = harness.bind(name, attrs(2, "dx", "dweight"), inputs, outputs)
    assert needs.in_place == ()


@pytest.mark.parametrize("bad", [130, 128, -1])
def test_a_label_out_of_range_is_named_with_its_position(bad, harness):
    problem = Problem(harness, 20, 4, 128)
    lse = problem.loss(6)[1]
    problem.labels[17:] = bad
    text = rf"label {bad} at position 17 is outside 0\.\.127"
    for call in (problem.loss, problem.train, lambda rows: problem.gradients(rows, lse)):
        with pytest.raises(IndexError, match=text):
            call(6)


def operand(shape, dtype=DType.FLOAT32):
    return Operand(TensorType(dtype, shape), 0, contiguous_strides(shape, dtype.itemsize))


def gpt2_needs(name, chunk_rows):
    """Return the needs of a call with the extents of GPT-2 small, 8 sequences of 1,024 tokens."""
    x, weight = operand((8192, 768)), operand((50257, 768))
    scalar, rows = operand(()), operand((8192,))
    inputs = (x, weight, operand((8192,), DType.INT64))
    if name == "linear_cross_entropy":
        return catalogue.choose(name, attrs(chunk_rows), inputs, (scalar, rows))[1]
    is_train = name.endswith("train")
    inputs = (scalar, *inputs) if is_train else (scalar, *inputs, rows)
    outputs = (scalar, x, weight) if is_train else (x, weight)
    return catalogue.choose(name, attrs(chunk_rows, "dx", "dweight"), inputs, outputs)[1]


NAMES = ("linear_cross_entropy", "linear_cross_entropy_grad", "linear_cross_entropy_train")


@pytest.mark.parametrize("name", NAMES)
def test_scratch_is_a_chunk_of_logits_and_a_few_mebibytes(name):
    for chunk_rows in (40, 249):
        chunk_bytes = chunk_rows * 50257 * 4
        size = gpt2_needs(name, chunk_rows).workspace_bytes
        assert chunk_bytes < size < chunk_bytes + (6 << 20)
    assert size < 64 << 20


def test_one_pass_is_estimated_below_two_and_more_chunks_above_fewer():
    loss, grad, train = [gpt2_needs(name, 249).duration_ns for name in NAMES]
    assert max(loss, grad) < train < loss + grad
    assert gpt2_needs(NAMES[2], 16).duration_ns > train


def test_half_floats_and_float_labels_are_refused():
    half, x, weight = (operand(shape, DType.FLOAT16) for shape in ((), (4, 3), (5, 3)))
    labels, rows = operand((4,), DType.INT64), operand((4,), DType.FLOAT16)
    with pytest.raises(LookupError, match=r"no host kernel takes linear_cross_entropy\(float16"):
        catalogue.choose(NAMES[0], attrs(2), (x, weight, labels), (half, rows))
