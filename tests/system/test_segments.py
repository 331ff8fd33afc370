"""Rows in one sequence are to attention what they are alone: nothing comes from another segment."""

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow import nn
from compiler.contract.errors import CompileError

LENGTH, WIDTH, HEADS = 12, 8, 2
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 3 + [2] * 9], np.int32)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
DY = RNG.standard_normal((2, LENGTH, WIDTH)).astype(np.float32)
RANGES = [(0, 0, 5), (0, 5, 9), (1, 0, 3), (1, 3, 12)]


class Block(nn.Module):
    """Our attention."""

    def __init__(self, causal):
        self.block = nn.TransformerBlock(WIDTH, heads=HEADS, causal=causal)

    def __call__(self, x, segments=None):
        return self.block(x, segments)


class Torchs(nn.Module):
    """Attention by torch's names, with a mask that hides nothing, and the weights."""

    def __init__(self, causal):
        self.attn, self.causal = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), causal

    def __call__(self, x, segments=None):
        seen = np.zeros((x.shape[1], x.shape[1]), bool)
        y, weights = self.attn(
            x, x, x, attn_mask=None if self.causal else seen, is_causal=self.causal,
            segments=segments,
        )  # fmt: skip
        return y + 0.01 * weights.sum(-1, keepdim=True)


class Grouped(nn.Module):
    """Heads of queries that share those of keys."""

    def __init__(self, causal):
        self.q, self.kv, self.causal = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def __call__(self, x, segments=None):
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, 4, 4).permute(0, 2, 1, 3)
        k = self.kv(x).reshape(batch, length, 2, 4).permute(0, 2, 1, 3)
        y = af.scaled_dot_product_attention(
            q, k, k, is_causal=self.causal, enable_gqa=True, segments=segments
        )
        return y.permute(0, 2, 1, 3).reshape(batch, length, 2, WIDTH).sum(2)


def outputs_and_gradients(model, x, dy, segments=None):
    """Return outputs, and what flows from dy into x and into the parameters."""

    def fn(model, batch):
        y = model(batch.x, batch.s if segments is not None else None)
        grads = af.grad((y * batch.dy).sum(), [batch.x, *[p for _, p in model.named_parameters()]])
        return {"y": y, **{f"d{i}": g for i, g in enumerate(grads)}}

    batch = {"x": x, "dy": dy} | ({} if segments is None else {"s": segments})
    found = af.job(fn, train=False).step(model, batch)
    return found.pop("y"), found.pop("d0"), list(found.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layer", [Block, Torchs, Grouped])
def test_packed_rows_are_rows_alone(layer, causal):
    model = layer(causal)
    model.init(1)
    inside = DY * (SEGMENTS > 0)[..., None].astype(np.float32)
    y, dx, of_weights = outputs_and_gradients(model, X, inside, SEGMENTS)
    sums = [np.zeros_like(g) for g in of_weights]
    for row, start, stop in RANGES:
        place = np.s_[row : row + 1, start:stop]
        one, own, more = outputs_and_gradients(model, X[place], DY[place])
        np.testing.assert_allclose(y[place], one, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dx[place], own, rtol=1e-4, atol=1e-5)
        sums = [total + part for total, part in zip(sums, more, strict=True)]
    for total, whole in zip(sums, of_weights, strict=True):
        np.testing.assert_allclose(whole, total, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_crosses_a_border(causal, precision):
    model = Block(causal)
    model.init(1)

    def fn(model, batch):
        y = model(batch.x, batch.s)
        return {"y": y, "dx": af.grad((y * batch.dy).sum(), [batch.x])[0]}

    job = af.job(fn, train=False, precision=precision)
    for row, start, stop in RANGES:
        own = np.zeros_like(DY)
        own[row, start:stop] = DY[row, start:stop]
        first = job.step(model, {"x": X, "dy": own, "s": SEGMENTS})
        is_own = own != 0
        assert not first["dx"][~is_own].any()
        assert first["dx"][is_own].any()
        other = np.where(is_own, X, X + 3.0).astype(np.float32)
        second = job.step(model, {"x": other, "dy": own, "s": SEGMENTS})
        assert first["y"][is_own].tobytes() == second["y"][is_own].tobytes()
        assert first["dx"].tobytes() == second["dx"].tobytes()


@pytest.mark.parametrize(
    ("x", "segments"),
    [
        (np.ones((2, 3, 4), np.float32), np.ones((2, 4), np.int32)),
        (np.ones((2, 3, 4), np.float32), np.ones((2, 3), np.float32)),
        (np.ones((3, 4), np.float32), np.ones((1, 3), np.int32)),
    ],
)
def test_segments_have_a_number_for_each_query(x, segments):
    job = af.job(lambda m, b: af.attention(b.x, b.x, b.x, segments=b.s), train=False)
    with raises(CompileError):
        job.step(nn.Identity(), {"x": x, "s": segments})
