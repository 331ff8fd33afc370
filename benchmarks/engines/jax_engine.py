"""jax at its best: the whole step is one jitted function whose state is donated."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rows.row import Row, is_linear, is_sparse

from engines.serve import gemm_operands, mean_square, round_robin, serve
from engines.structure import families, hidden

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
NUM_CHUNKS = 8
"""Of the rows of a large vocabulary's logits, where the loss goes by chunks."""


relu, tanh, gelu = jax.nn.relu, jnp.tanh, partial(jax.nn.gelu, approximate=False)
concat, stack, einsum, broadcast_to = jnp.concatenate, jnp.stack, jnp.einsum, jnp.broadcast_to
reshape, tanh_gelu = jnp.reshape, partial(jax.nn.gelu, approximate=True)
CHANNELS = -1


def linear(p, name, x):
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p, name, x, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def cross_entropy(scores, labels):
    scores = scores.reshape(-1, scores.shape[-1])
    picked = jnp.take_along_axis(scores, labels.reshape(-1, 1), axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - picked)


def binary_cross_entropy(logits, labels):
    return jnp.mean(jax.nn.softplus(logits) - logits * labels)


def mean_squared(x, y):
    return jnp.mean(jnp.square(x - y))


def attend(p, prefix, x, heads, is_causal):
    b, t, d = x.shape
    parts = jnp.split(linear(p, f"{prefix}attn.qkv", x), 3, axis=-1)
    q, k, v = (a.reshape(b, t, heads, d // heads).transpose(0, 2, 1, 3) for a in parts)
    scores = q @ k.swapaxes(-1, -2) * (d // heads) ** -0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    y = jax.nn.softmax(scores, axis=-1) @ v
    return linear(p, f"{prefix}attn.proj", y.transpose(0, 2, 1, 3).reshape(b, t, d))


def look_up(table, ids):
    return table[ids]


picked = look_up


def columns(x, places):
    return x[:, jnp.array(places)]


def read(parameter):
    return parameter


def scores_of(x, table, bias=0.0):
    return x @ table.T + bias


def found(row, p, batch):
    """Rows of tables, which were looked up before."""
    return [rows.reshape(len(rows), -1) for rows in p["found"]]


def chunked_gpt(row, p, batch):
    """The same loss by chunks of rows, whose logits are made again for their gradient."""
    h, labels = hidden(_LAYERS, row, p, batch["x"]), batch["y"]

    @jax.checkpoint
    def chunk(rows):
        return cross_entropy(linear(p, "head", rows[0]), rows[1])

    parts = h.reshape(NUM_CHUNKS, -1, h.shape[-1]), labels.reshape(NUM_CHUNKS, -1)
    return jnp.mean(jax.lax.map(chunk, parts))


def lstm(row, p, batch):
    h = p["emb.weight"][batch["x"]]
    for i in range(row.sizes["layers"]):
        weight = p[f"lstm.weight_hh_l{i}"]
        bias = p[f"lstm.bias_ih_l{i}"] + p[f"lstm.bias_hh_l{i}"]

        def step(state, given, weight=weight):
            h, c = state
            i, f, g, o = jnp.split(given + h @ weight, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(h.shape[1:])
        h = jax.lax.scan(step, (zeros, zeros), h @ p[f"lstm.weight_ih_l{i}"] + bias)[1]
    return cross_entropy(linear(p, "head", h), batch["y"])


AXES = ("NHWC", "HWIO", "NHWC")
"""Channels of pictures lie last, as XLA's own kernels on a host want them."""


def convolved(p, name, x, stride=1, padding=None):
    weight = p[f"{name}.weight"]
    padding = weight.shape[0] // 2 if padding is None else padding
    around = ((padding, padding),) * 2
    y = jax.lax.conv_general_dilated(x, weight, (stride, stride), around, dimension_numbers=AXES)
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def upsampled(p, name, x):
    y = jax.lax.conv_transpose(
        x, p[f"{name}.weight"], (2, 2), "VALID", dimension_numbers=AXES, transpose_kernel=True
    )
    return y + p[f"{name}.bias"]


def max_pool(x, extent, stride, padding=0):
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    windows = (1, extent, extent, 1), (1, stride, stride, 1), around
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *windows)


def batch_norm(row, p, name, x):
    """Normalise; what running statistics become is put into `p`, for the step to take."""
    mean, variance = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    if row.is_training:
        count = x.size // x.shape[-1]
        own_mean = jnp.mean(x, (0, 1, 2))
        own_variance = jnp.mean(jnp.square(x - own_mean), (0, 1, 2))
        p[STATISTICS][f"{name}.running_mean"] = 0.9 * mean + 0.1 * own_mean
        unbiased = own_variance * (count / (count - 1))
        p[STATISTICS][f"{name}.running_var"] = 0.9 * variance + 0.1 * unbiased
        mean, variance = own_mean, own_variance
    scale = p[f"{name}.weight"] * jax.lax.rsqrt(variance + 1e-5)
    return (x - mean) * scale + p[f"{name}.bias"]


STATISTICS = "statistics"


def pixel_mean(x):
    return x.mean((1, 2))


def flat(x):
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def tokens(x):
    return x.reshape(len(x), -1, x.shape[-1])


_LAYERS = sys.modules[__name__]
FAMILIES = families(_LAYERS) | {"lstm": lstm, "chunked_gpt": chunked_gpt}


def laid_out(name, array):
    """Return an array as jax's own libraries keep it: [in, out], and channels last."""
    if array.ndim == 4:
        return array.transpose(*((0, 2, 3, 1) if name == "x" else (2, 3, 1, 0)))
    return array.T if is_linear(name, array) else array


def sgd_step(row: Row):
    rate, function = row.optimizer.rate, FAMILIES[row.family]

    def loss_of(p, batch):
        statistics = {}
        return function(row, p | {STATISTICS: statistics}, batch), statistics

    def step(p, state, batch):
        (loss, statistics), gradient = jax.value_and_grad(loss_of, has_aux=True)(p, batch)
        return jax.tree.map(lambda w, g: w - rate * g, p, gradient) | statistics, state, loss

    return step


def sparse_step(row: Row):
    """Differentiate by the rows that were read, and scatter their gradients into the tables."""
    rate = row.optimizer.rate

    def step(p, state, batch):
        names = [n for n in row.weights() if is_sparse(n)]
        parts = jnp.split(batch["ids"], len(names), 1)
        dense = {n: w for n, w in p.items() if n not in names}
        leaves = dense | {"found": [p[n][ids] for n, ids in zip(names, parts, strict=True)]}
        slope = jax.value_and_grad(lambda r: FAMILIES[row.family](row, r, batch))
        loss, gradient = slope(leaves)
        new = {n: w - rate * gradient[n] for n, w in dense.items()}
        for n, ids, rows in zip(names, parts, gradient["found"], strict=True):
            new[n] = p[n].at[ids].add(-rate * rows)
        return new, state, loss

    return step


def adamw_step(row: Row):
    rate, decay = row.optimizer.rate, row.optimizer.decay

    def step(p, state, batch):
        count, m, v = state
        loss, gradient = jax.value_and_grad(lambda p: FAMILIES[row.family](row, p, batch))(p)
        count = count + 1
        # 1 - beta**count, without the cancellation that costs three digits in float32.
        one, two = -jnp.expm1(count * math.log(BETA1)), -jnp.expm1(count * math.log(BETA2))
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, v, gradient)
        p = jax.tree.map(
            lambda w, m, v: w * (1 - rate * decay) - rate * (m / one) / (jnp.sqrt(v / two) + EPS),
            p,
            m,
            v,
        )
        return p, (count, m, v), loss

    return step


@dataclass(slots=True)
class Session:
    row: Row
    parameters: dict
    state: object
    function: Callable
    next_batch: Callable

    def advance(self):
        batch = self.next_batch()
        if not self.row.is_training:
            return self.function(self.parameters, batch)
        self.parameters, self.state, loss = self.function(self.parameters, self.state, batch)
        return loss

    def step(self) -> float:
        output = self.advance()
        return float(output) if self.row.is_training else mean_square(np.asarray(output))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            output = self.advance()
            if not self.row.is_training:  # an answer is waited for
                output.block_until_ready()
        jax.block_until_ready(self.parameters)

    def describe(self) -> dict[str, object]:
        chunks = ", loss in chunks" if self.row.family == "chunked_gpt" else ""
        return {"settings": f"jax {jax.__version__}, jit of the whole step, donated state{chunks}"}


class Jax:
    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        if precision != "fp32":
            raise ValueError(f"expected fp32, got {precision}: bf16 is torch's autocast alone")
        target = "cpu" if device == "host" else "gpu"
        if jax.default_backend() != target:
            raise ValueError(f"jax {jax.__version__} runs on {jax.default_backend()}, not {target}")
        parameters = {
            n: jnp.array(laid_out(n, a), copy=True)
            for n, a in row.weights().items()
            if not n.endswith(".num_batches_tracked")
        }
        batches = [
            {n: jnp.array(laid_out(n, a)) for n, a in batch.items()} for batch in row.batches()
        ]
        if variant == "chunked":
            row = replace(row, family="chunked_gpt")
        function, state = self._step(row, parameters)
        return Session(row, parameters, state, function, round_robin(batches))

    def _step(self, row: Row, parameters: dict):
        if not row.is_training:
            return jax.jit(lambda p, batch: FAMILIES[row.family](row, p, batch)), ()
        if row.optimizer.kind == "adamw":
            zeros = [jax.tree.map(jnp.zeros_like, parameters) for _ in range(2)]
            return jax.jit(adamw_step(row), donate_argnums=(0, 1)), (jnp.float32(0), *zeros)
        step = sparse_step(row) if any(map(is_sparse, parameters)) else sgd_step(row)
        return jax.jit(step, donate_argnums=(0, 1)), ()

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        dtype = jnp.float32 if precision == "fp32" else jnp.bfloat16
        a, b = (jnp.array(x, dtype) for x in gemm_operands())
        multiply = jax.jit(jnp.matmul)
        return {"jax": lambda: multiply(a, b).block_until_ready()}


if __name__ == "__main__":
    serve(Jax)
