"""Connectionist temporal classification against torch."""

import numpy as np
import pytest
from error_texts import raises
from oracle import Case, floats, seeded

import actorflow as af
from actorflow import nn

SHAPES = [
    *((1, 1, 2, 1), (8, 3, 5, 3), (9, 2, 3, 0), (12, 1, 4, 5), (2, 2, 2, 4), (5, 4, 2, 1)),
    *((3, 1, 7, 2), (16, 2, 3, 7), (7, 5, 4, 2), (4, 1, 3, 0)),
]
SIZES = [(*shape, key) for shape in SHAPES for key in range(2)]
"""Inputs, sequences, classes, labels, and a seed."""


def drawn(steps, batch, classes, length, key=0):
    """Return logits, targets with repeats, and lengths; some targets fit in no input."""
    rng = seeded(steps, batch, classes, length, key)
    (x,) = floats((steps, batch, classes), key=(length, key))
    targets = rng.integers(1, classes, (batch, length))
    inputs = rng.integers(max(1, steps // 2), steps + 1, batch)
    return x, targets, inputs, rng.integers(min(length, 1), length + 1, batch)


def fitting(steps, batch, classes, length, key=0):
    """Return the same, where every target has an alignment."""
    x, targets, inputs, lengths = drawn(steps, batch, classes, length, key)
    return x, targets, np.full_like(inputs, steps), np.minimum(lengths, steps // 2)


def flat(steps, batch, classes, length, key=0):
    """Return the same with targets one after the other."""
    x, targets, inputs, lengths = fitting(steps, batch, classes, length, key)
    rows = [row[:n] for row, n in zip(targets, lengths, strict=True)]
    return x, np.concatenate(rows), inputs, lengths


def ours(x, y, inputs, lengths, **options):
    return af.ctc_loss(af.log_softmax(x, -1), y, inputs, lengths, **options)


def torchs(t, x, y, inputs, lengths, **options):
    return t.nn.functional.ctc_loss(x.log_softmax(-1), y, inputs, lengths, **options)


CASES = [
    Case("ctc_loss of joined targets", ours, torchs, [flat(*size) for size in SIZES]),
    Case(
        "ctc_loss, sums, blank last",
        lambda x, y, i, n: ours(x, y - 1, i, n, blank=x.shape[-1] - 1, reduction="sum"),
        lambda t, x, y, i, n: torchs(t, x, y - 1, i, n, blank=x.shape[-1] - 1, reduction="sum"),
        [fitting(*size) for size in SIZES],
    ),
    Case(
        "ctc_loss with what has no alignment",
        lambda x, y, i, n: nn.CTCLoss(zero_infinity=True)(af.log_softmax(x, -1), y, i, n),
        lambda t, x, y, i, n: torchs(t, x, y, i, n, zero_infinity=True),
        [drawn(*size) for size in SIZES],
    ),
    Case(
        "ctc_loss, infinite",
        lambda x, y, i, n: ours(x, y, i, n, reduction="none"),
        lambda t, x, y, i, n: torchs(t, x, y, i, n, reduction="none"),
        [drawn(*size) for size in SIZES],
        has_gradient=False,
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def stepped(compute, **fed):
    job = af.job(lambda model, batch: compute(batch), train=False)
    return job.step(nn.Module(), fed)["output"]


def test_one_sequence_has_no_axis_of_the_batch():
    x, y, inputs, lengths = drawn(6, 1, 4, 2)
    fed = {"x": x, "y": y}
    whole = stepped(lambda b: ours(b.x, b.y, inputs, lengths), **fed)
    alone = stepped(lambda b: ours(b.x[:, 0], b.y[0], int(inputs[0]), int(lengths[0])), **fed)
    assert np.shape(alone) == ()
    np.testing.assert_allclose(alone, whole, rtol=1e-12)


def test_what_cannot_be_aligned_costs_infinity_and_has_a_finite_gradient():
    x = np.zeros((2, 1, 3), np.float32)
    y = np.array([[1, 1]])

    def compute(batch):
        return ours(batch.x, batch.y, (2,), (2,))

    assert stepped(compute, x=x, y=y) == np.inf
    grad = stepped(lambda b: af.grad(compute(b), b.x), x=x, y=y)
    np.testing.assert_array_equal(grad, np.zeros_like(x))


def test_padding_may_be_anything():
    x, _, inputs, _ = drawn(6, 2, 4, 3)
    fed = [np.array([[1, 2, last], [3, last, last]]) for last in (0, -100)]
    zero, minus = [stepped(lambda b: ours(b.x, b.y, inputs, (2, 1)), x=x, y=y) for y in fed]
    np.testing.assert_array_equal(zero, minus)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: af.ctc_loss(x, y, (4,), (1, 1)),
        lambda x, y: af.ctc_loss(x, y, (4, 4), (1, 1), blank=3),
        lambda x, y: af.ctc_loss(x, y[:1], (4, 4), (1, 1)),
        lambda x, y: af.ctc_loss(x[:, 0], y[0], (4, 4), 1),
        lambda x, y: af.ctc_loss(x, y, (1.5, 4), (1, 1)),
        lambda x, y: af.ctc_loss(x, y, (4, 4), [[1], 1]),
        lambda x, y: af.ctc_loss(x[0, 0], y, (4, 4), (1, 1)),
    ],
)
def test_what_cannot_be_is_an_error_with_the_users_line(call):
    fed = {"x": np.zeros((4, 2, 3), np.float32), "y": np.ones((2, 1), np.int64)}
    with raises(af.CompileError):
        stepped(lambda b: call(b.x, b.y), **fed)
