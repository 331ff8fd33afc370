"""The encoder and decoder that are one model; `tests/oracle` holds its values against torch's."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn

X = np.random.default_rng(0).standard_normal((5, 2, 4)).astype(np.float32)


def out(model, function, **batch):
    return af.job(train=False)(lambda m, b: function(m, b)).step(model, batch)


def test_a_causal_flag_is_the_mask_of_later_places():
    model = nn.Transformer(4, 2, 1, 1, 8)
    mask = model.generate_square_subsequent_mask(5)
    np.testing.assert_array_equal(np.isneginf(mask), ~np.tri(5, dtype=bool))
    made = out(
        model,
        lambda m, b: {
            "flag": m(b.x, b.x, tgt_is_causal=True),
            "mask": m(b.x, b.x, tgt_mask=mask),
            "none": m(b.x, b.x),
        },
        x=X,
    )
    np.testing.assert_allclose(made["flag"], made["mask"], rtol=1e-5, atol=1e-6)
    assert np.abs(made["flag"] - made["none"]).max() > 1e-3


def test_the_batch_may_come_first_and_weights_start_by_glorots_rule():
    model = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True).init(3)
    other = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0).init(3)
    first = out(model, lambda m, b: m(b.x, b.x), x=X.swapaxes(0, 1))["output"]
    np.testing.assert_allclose(
        first.swapaxes(0, 1), out(other, lambda m, b: m(b.x, b.x), x=X)["output"], rtol=1e-5
    )
    for path, array in model.state().items():
        if array.ndim == 2:
            assert np.abs(array).max() <= np.sqrt(6 / sum(array.shape)), path


def test_own_encoders_and_decoders_are_taken_as_they_are():
    class Twice(nn.Module):
        def __call__(self, src, *masks):
            return src * 2.0

    class Sum(nn.Module):
        def __call__(self, tgt, memory, *masks):
            return tgt + memory

    model = nn.Transformer(4, 2, custom_encoder=Twice(), custom_decoder=Sum())
    np.testing.assert_array_equal(out(model, lambda m, b: m(b.x, b.x), x=X)["output"], 3 * X)


@pytest.mark.parametrize("tgt", [(5, 3, 4), (5, 4), (5, 2, 6)])
def test_sequences_of_other_batches_or_widths_are_refused(tgt):
    model = nn.Transformer(4, 2, 1, 1, 8)
    with raises(af.CompileError):
        out(model, lambda m, b: m(b.x, b.y), x=X, y=np.zeros(tgt, np.float32))
