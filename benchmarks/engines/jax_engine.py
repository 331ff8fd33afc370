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
from rows.row import Row, is_linear, is_table

from engines.serve import gemm_operands, mean_square, round_robin, serve
from engines.structure import resnet_features

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
NUM_CHUNKS = 8
"""Of the rows of a large vocabulary's logits, where the loss goes by chunks."""


def linear(p, name, x):
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def norm(p, name, x):
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def cross_entropy(scores, labels):
    scores = scores.reshape(-1, scores.shape[-1])
    picked = jnp.take_along_axis(scores, labels.reshape(-1, 1), axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=1) - picked)


def chain(row, p, x):
    last = row.sizes["layers"] - 1
    for i in range(last):
        x = jax.nn.relu(linear(p, f"layers.{i}", x))
    return linear(p, f"layers.{last}", x)


def attend(p, prefix, x, heads, is_causal):
    b, t, d = x.shape
    parts = jnp.split(linear(p, f"{prefix}attn.qkv", x), 3, axis=-1)
    q, k, v = (a.reshape(b, t, heads, d // heads).transpose(0, 2, 1, 3) for a in parts)
    scores = q @ k.swapaxes(-1, -2) * (d // heads) ** -0.5
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf)
    y = jax.nn.softmax(scores, axis=-1) @ v
    return linear(p, f"{prefix}attn.proj", y.transpose(0, 2, 1, 3).reshape(b, t, d))


def feed_forward(p, prefix, x):
    up = linear(p, f"{prefix}mlp.up", x)
    return linear(p, f"{prefix}mlp.down", jax.nn.gelu(up, approximate=True))


def block(p, prefix, x, heads):
    x = x + attend(p, prefix, norm(p, f"{prefix}norm1", x), heads, is_causal=True)
    return x + feed_forward(p, prefix, norm(p, f"{prefix}norm2", x))


def bert_block(p, prefix, x, heads):
    x = norm(p, f"{prefix}norm1", x + attend(p, prefix, x, heads, is_causal=False))
    return norm(p, f"{prefix}norm2", x + feed_forward(p, prefix, x))


def tiny(row, p, batch):
    x = batch["x"]
    for i in range(row.sizes["layers"]):
        h = x @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
        x = (jax.nn.relu(h) if i % 2 else jnp.tanh(h)) * p[f"layers.{i}.g"]
    return jnp.mean(jnp.square(x - batch["y"]))


def mlp(row, p, batch):
    return cross_entropy(chain(row, p, batch["x"]), batch["y"])


def hidden(row, p, batch):
    h = p["emb.weight"][batch["x"]] + p["pos.weight"]
    for i in range(row.sizes["layers"]):
        h = block(p, f"blocks.{i}.", h, row.sizes["heads"])
    return norm(p, "norm", h)


def gpt(row, p, batch):
    scores = linear(p, "head", hidden(row, p, batch))
    return cross_entropy(scores, batch["y"]) if row.is_training else scores


def bert(row, p, batch):
    h = p["emb.weight"][batch["x"]] + p["pos.weight"] + p["segment.weight"][batch["segments"]]
    h = norm(p, "first", h)
    for i in range(row.sizes["layers"]):
        h = bert_block(p, f"blocks.{i}.", h, row.sizes["heads"])
    masked = linear(p, "dense", h.reshape(-1, h.shape[-1])[batch["places"]])
    masked = norm(p, "last", jax.nn.gelu(masked, approximate=True))
    return cross_entropy(masked @ p["emb.weight"].T + p["bias"], batch["y"])


def chunked_gpt(row, p, batch):
    """The same loss by chunks of rows, whose logits are made again for their gradient."""
    h, labels = hidden(row, p, batch), batch["y"]

    @jax.checkpoint
    def chunk(rows):
        return cross_entropy(linear(p, "head", rows[0]), rows[1])

    parts = h.reshape(NUM_CHUNKS, -1, h.shape[-1]), labels.reshape(NUM_CHUNKS, -1)
    return jnp.mean(jax.lax.map(chunk, parts))


def gpt2_block(row, p, batch):
    return jnp.mean(jnp.square(block(p, "block.", p["x"], row.sizes["heads"]) - batch["y"]))


def wide_deep(row, p, batch):
    x = jnp.concatenate([*p["found"], batch["dense"]], axis=1)
    return cross_entropy(chain(row, p, x) + linear(p, "wide", batch["dense"]), batch["y"])


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


def convolved(x, weight, stride=1, padding=0):
    """Convolve pictures whose channels lie last, as XLA's own kernels on a host want them."""
    around, axes = ((padding, padding),) * 2, ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), around, dimension_numbers=axes)


def largest(x, extent, stride, padding=0):
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    windows = (1, extent, extent, 1), (1, stride, stride, 1), around
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *windows)


def lenet(row, p, batch):
    x = convolved(batch["x"], p["conv1.weight"], padding=2) + p["conv1.bias"]
    x = convolved(largest(jax.nn.relu(x), 2, 2), p["conv2.weight"]) + p["conv2.bias"]
    x = largest(jax.nn.relu(x), 2, 2).transpose(0, 3, 1, 2)
    x = jax.nn.relu(linear(p, "fc1", x.reshape(len(x), -1)))
    return cross_entropy(linear(p, "fc3", jax.nn.relu(linear(p, "fc2", x))), batch["y"])


def resnet(row, p, batch):
    """Return the loss and what running statistics become; of an inference the scores."""
    statistics = {}

    def normalised(conv, norm, x, stride):
        weight = p[f"{conv}.weight"]
        x = convolved(x, weight, stride, weight.shape[0] // 2)
        mean, variance = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        if row.is_training:
            count = x.size // x.shape[-1]
            own_mean = jnp.mean(x, (0, 1, 2))
            own_variance = jnp.mean(jnp.square(x - own_mean), (0, 1, 2))
            statistics[f"{norm}.running_mean"] = 0.9 * mean + 0.1 * own_mean
            unbiased = own_variance * (count / (count - 1))
            statistics[f"{norm}.running_var"] = 0.9 * variance + 0.1 * unbiased
            mean, variance = own_mean, own_variance
        scale = p[f"{norm}.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + p[f"{norm}.bias"]

    pool = partial(largest, extent=3, stride=2, padding=1)
    is_large = p["conv1.weight"].shape[0] == 7
    x = resnet_features(p, batch["x"], normalised, jax.nn.relu, pool if is_large else None)
    scores = linear(p, "fc", x.mean((1, 2)))
    return (cross_entropy(scores, batch["y"]), statistics) if row.is_training else scores


FAMILIES = {
    f.__name__: f
    for f in (tiny, mlp, gpt, bert, chunked_gpt, gpt2_block, wide_deep, lstm, lenet, resnet)
}


def laid_out(name, array):
    """Return an array as jax's own libraries keep it: [in, out], and channels last."""
    if array.ndim == 4:
        return array.transpose(*((0, 2, 3, 1) if name == "x" else (2, 3, 1, 0)))
    return array.T if is_linear(name, array) else array


def sgd_step(row: Row):
    rate, function = row.optimizer.rate, FAMILIES[row.family]

    def step(p, state, batch):
        statistics = {}
        if row.family == "resnet":
            slope = jax.value_and_grad(lambda p: function(row, p, batch), has_aux=True)
            (loss, statistics), gradient = slope(p)
        else:
            loss, gradient = jax.value_and_grad(lambda p: function(row, p, batch))(p)
        return jax.tree.map(lambda w, g: w - rate * g, p, gradient) | statistics, state, loss

    return step


def sparse_step(row: Row):
    """Differentiate by the rows that were read, and scatter their gradients into the tables."""
    rate, names = row.optimizer.rate, [f"tables.{i}.weight" for i in range(row.sizes["tables"])]

    def step(p, state, batch):
        columns = [batch["ids"][:, i] for i in range(len(names))]
        dense = {n: w for n, w in p.items() if n not in names}
        leaves = dense | {"found": [p[n][ids] for n, ids in zip(names, columns, strict=True)]}
        loss, gradient = jax.value_and_grad(lambda r: wide_deep(row, r, batch))(leaves)
        new = {n: w - rate * gradient[n] for n, w in dense.items()}
        for n, ids, rows in zip(names, columns, gradient["found"], strict=True):
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
        has_tables = any([n.startswith("tables.") and is_table(n) for n in parameters])
        step = sparse_step(row) if has_tables else sgd_step(row)
        return jax.jit(step, donate_argnums=(0, 1)), ()

    def gemm(self) -> dict[str, Callable[[], object]]:
        a, b = (jnp.array(x) for x in gemm_operands())
        multiply = jax.jit(jnp.matmul)
        return {"jax": lambda: multiply(a, b).block_until_ready()}


if __name__ == "__main__":
    serve(Jax)
