"""TensorFlow at its best: one tf.function per step, with or without XLA, and fused updates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tensorflow as tf
from rows.row import Row, is_buffer, is_linear

from engines.serve import (
    gemm_operands,
    mean_square,
    num_threads,
    round_robin,
    serve,
)
from engines.structure import resnet_features

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def linear(p, name, x):
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    rows = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, x.shape[-1])), weight), bias)
    return tf.reshape(rows, (*x.shape[:-1], weight.shape[-1]))


def norm(p, name, x):
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    return (x - mean) * tf.math.rsqrt(variance + 1e-5) * weight + bias


def cross_entropy(scores, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.reshape(labels, (-1,)), tf.reshape(scores, (-1, scores.shape[-1]))
    )
    return tf.reduce_mean(losses)


def chain(row, p, x):
    last = row.sizes["layers"] - 1
    for i in range(last):
        x = tf.nn.relu(linear(p, f"layers.{i}", x))
    return linear(p, f"layers.{last}", x)


def attend(p, prefix, x, heads, is_causal):
    b, t, d = x.shape
    parts = tf.split(linear(p, f"{prefix}attn.qkv", x), 3, axis=-1)
    q, k, v = (tf.transpose(tf.reshape(a, (b, t, heads, d // heads)), (0, 2, 1, 3)) for a in parts)
    scores = tf.matmul(q, k, transpose_b=True) * (d // heads) ** -0.5
    if is_causal:
        scores += (1.0 - tf.linalg.band_part(tf.ones((t, t)), -1, 0)) * -1e30
    y = tf.matmul(tf.nn.softmax(scores), v)
    joined = tf.reshape(tf.transpose(y, (0, 2, 1, 3)), (b, t, d))
    return linear(p, f"{prefix}attn.proj", joined)


def feed_forward(p, prefix, x):
    up = linear(p, f"{prefix}mlp.up", x)
    return linear(p, f"{prefix}mlp.down", tf.nn.gelu(up, approximate=True))


def block(p, prefix, x, heads):
    x = x + attend(p, prefix, norm(p, f"{prefix}norm1", x), heads, is_causal=True)
    return x + feed_forward(p, prefix, norm(p, f"{prefix}norm2", x))


def bert_block(p, prefix, x, heads):
    x = norm(p, f"{prefix}norm1", x + attend(p, prefix, x, heads, is_causal=False))
    return norm(p, f"{prefix}norm2", x + feed_forward(p, prefix, x))


def tiny(row, p, batch):
    x = batch["x"]
    for i in range(row.sizes["layers"]):
        h = tf.matmul(x, p[f"layers.{i}.w"]) + p[f"layers.{i}.b"]
        x = (tf.nn.relu(h) if i % 2 else tf.tanh(h)) * p[f"layers.{i}.g"]
    return tf.reduce_mean(tf.square(x - batch["y"]))


def mlp(row, p, batch):
    return cross_entropy(chain(row, p, batch["x"]), batch["y"])


def gpt(row, p, batch):
    h = tf.gather(p["emb.weight"], batch["x"]) + p["pos.weight"]
    for i in range(row.sizes["layers"]):
        h = block(p, f"blocks.{i}.", h, row.sizes["heads"])
    scores = linear(p, "head", norm(p, "norm", h))
    return cross_entropy(scores, batch["y"]) if row.is_training else scores


def bert(row, p, batch):
    h = tf.gather(p["emb.weight"], batch["x"]) + p["pos.weight"]
    h = norm(p, "first", h + tf.gather(p["segment.weight"], batch["segments"]))
    for i in range(row.sizes["layers"]):
        h = bert_block(p, f"blocks.{i}.", h, row.sizes["heads"])
    masked = tf.gather(tf.reshape(h, (-1, h.shape[-1])), batch["places"])
    masked = norm(p, "last", tf.nn.gelu(linear(p, "dense", masked), approximate=True))
    scores = tf.matmul(masked, p["emb.weight"], transpose_b=True)
    return cross_entropy(tf.nn.bias_add(scores, p["bias"]), batch["y"])


def gpt2_block(row, p, batch):
    # As a tensor, the input's gradient is one array and no list of reads of the variable.
    x = tf.convert_to_tensor(p["x"])
    return tf.reduce_mean(tf.square(block(p, "block.", x, row.sizes["heads"]) - batch["y"]))


def wide_deep(row, p, batch):
    columns = tf.unstack(batch["ids"], axis=1)
    rows = [tf.gather(p[f"tables.{i}.weight"], ids) for i, ids in enumerate(columns)]
    x = tf.concat([*rows, batch["dense"]], axis=1)
    return cross_entropy(chain(row, p, x) + linear(p, "wide", batch["dense"]), batch["y"])


def lstm(row, p, batch):
    h = tf.gather(p["emb.weight"], batch["x"])
    for i in range(row.sizes["layers"]):
        bias = p[f"lstm.bias_ih_l{i}"] + p[f"lstm.bias_hh_l{i}"]
        rows = tf.matmul(tf.reshape(h, (-1, h.shape[-1])), p[f"lstm.weight_ih_l{i}"])
        inputs = tf.reshape(tf.nn.bias_add(rows, bias), (*h.shape[:-1], bias.shape[0]))
        # Step by step in the graph: a loop of TensorFlow's keeps each step's tensors on stacks.
        state = c = tf.zeros(h.shape[1:])
        states = []
        for entry in tf.unstack(inputs):
            sums = entry + tf.matmul(state, p[f"lstm.weight_hh_l{i}"])
            gates = tf.split(sums, 4, axis=1)
            c = tf.sigmoid(gates[1]) * c + tf.sigmoid(gates[0]) * tf.tanh(gates[2])
            state = tf.sigmoid(gates[3]) * tf.tanh(c)
            states.append(state)
        h = tf.stack(states)
    return cross_entropy(linear(p, "head", h), batch["y"])


def convolved(x, weight, stride=1, padding=0):
    """Convolve pictures whose channels lie last, the only ones that a host takes."""
    around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    return tf.nn.conv2d(x, weight, stride, around)


def lenet(row, p, batch):
    x = tf.nn.bias_add(convolved(batch["x"], p["conv1.weight"], padding=2), p["conv1.bias"])
    x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    x = tf.nn.bias_add(convolved(x, p["conv2.weight"]), p["conv2.bias"])
    x = tf.transpose(tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID"), (0, 3, 1, 2))
    x = tf.nn.relu(linear(p, "fc1", tf.reshape(x, (x.shape[0], -1))))
    return cross_entropy(linear(p, "fc3", tf.nn.relu(linear(p, "fc2", x))), batch["y"])


def resnet(row, p, batch):
    def normalised(conv, norm, x, stride):
        weight = p[f"{conv}.weight"]
        x = convolved(x, weight, stride, weight.shape[0] // 2)
        mean, variance = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        y, new_mean, new_variance = tf.compat.v1.nn.fused_batch_norm(
            x,
            p[f"{norm}.weight"],
            p[f"{norm}.bias"],
            mean,
            variance,
            epsilon=1e-5,
            is_training=row.is_training,
            exponential_avg_factor=0.1,
        )
        if row.is_training:
            mean.assign(new_mean)
            variance.assign(new_variance)
        return y

    def pool(x):
        # Of numbers that are not below 0 the largest is the same with zeros around.
        around = [[0, 0], [1, 1], [1, 1], [0, 0]]
        return tf.nn.max_pool2d(tf.pad(x, around), 3, 2, "VALID")

    is_large = p["conv1.weight"].shape[0] == 7
    x = resnet_features(p, batch["x"], normalised, tf.nn.relu, pool if is_large else None)
    scores = linear(p, "fc", tf.reduce_mean(x, (1, 2)))
    return cross_entropy(scores, batch["y"]) if row.is_training else scores


FAMILIES = {
    f.__name__: f for f in (tiny, mlp, gpt, bert, gpt2_block, wide_deep, lstm, lenet, resnet)
}


def laid_out(name, array):
    """Return an array as TensorFlow keeps it: [in, out], and channels last."""
    if array.ndim == 4:
        return array.transpose(*((0, 2, 3, 1) if name == "x" else (2, 3, 1, 0)))
    return array.T if is_linear(name, array) else array


class Update:
    """Changes the parameters: one fused update each, rows only where the gradient is of rows."""

    def __init__(self, row: Row, parameters: dict) -> None:
        self._wanted = row.optimizer
        self._variables = list(parameters.values())
        if self._wanted.kind == "adamw":
            zeros = [tf.zeros_like(v) for v in self._variables]
            self._states = [(tf.Variable(z), tf.Variable(z)) for z in zeros]
            self._powers = tf.Variable(1.0), tf.Variable(1.0)

    def __call__(self, gradients) -> None:
        if self._wanted.kind == "adamw":
            self._adamw(gradients)
            return
        for variable, gradient in zip(self._variables, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.IndexedSlices(gradient.values * self._wanted.rate, gradient.indices)
                variable.scatter_sub(rows)
            else:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=self._wanted.rate, delta=gradient
                )

    def _adamw(self, gradients) -> None:
        one, two = self._powers
        one.assign(one * BETA1)
        two.assign(two * BETA2)
        shrink = 1 - self._wanted.rate * self._wanted.decay
        for variable, gradient, (m, v) in zip(
            self._variables, gradients, self._states, strict=True
        ):
            if self._wanted.decay:
                variable.assign(variable * shrink)
            # TensorFlow adds epsilon before the bias correction; scaled, it is torch's rule.
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=m.handle,
                v=v.handle,
                beta1_power=one,
                beta2_power=two,
                lr=self._wanted.rate,
                beta1=BETA1,
                beta2=BETA2,
                epsilon=EPS * tf.sqrt(1 - two),
                grad=tf.convert_to_tensor(gradient),
            )


@dataclass(slots=True)
class Session:
    row: Row
    function: Callable
    next_batch: Callable
    settings: str

    def step(self) -> float:
        output = self.function(self.next_batch())
        return float(output) if self.row.is_training else mean_square(output.numpy())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            output = self.function(self.next_batch())
        output.numpy()

    def describe(self) -> dict[str, object]:
        return {"settings": self.settings}


class TensorFlow:
    def __init__(self) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads())

    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        if device != "host":
            raise ValueError(f"tensorflow is compared on the host alone, not on {device}")
        if precision != "fp32":
            raise ValueError(f"expected fp32, got {precision}: bf16 is torch's autocast alone")
        parameters = {n: tf.Variable(laid_out(n, a)) for n, a in row.weights().items()}
        trained = {n: v for n, v in parameters.items() if not is_buffer(n)}
        batches = [
            {n: tf.constant(laid_out(n, a)) for n, a in batch.items()} for batch in row.batches()
        ]
        is_xla = variant == "xla"
        loss = FAMILIES[row.family]
        update = Update(row, trained)
        variables = list(trained.values())

        @tf.function(jit_compile=is_xla)
        def train(batch):
            with tf.GradientTape() as tape:
                value = loss(row, parameters, batch)
            update(tape.gradient(value, variables))
            return value

        @tf.function(jit_compile=is_xla)
        def infer(batch):
            return loss(row, parameters, batch)

        function = train if row.is_training else infer
        settings = f"tensorflow {tf.__version__}, tf.function(jit_compile={is_xla}), fused updates"
        return Session(row, function, round_robin(batches), settings)

    def gemm(self) -> dict[str, Callable[[], object]]:
        a, b = (tf.constant(x) for x in gemm_operands())
        multiply = tf.function(tf.matmul)
        return {"tensorflow": lambda: multiply(a, b).numpy()}


if __name__ == "__main__":
    serve(TensorFlow)
