"""TensorFlow at its best: one tf.function per step, with or without XLA, and fused updates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tensorflow as tf
from rows.row import Row, is_buffer, is_linear, is_sparse

from engines.serve import (
    gemm_operands,
    mean_square,
    num_threads,
    round_robin,
    serve,
)
from engines.structure import families

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


relu, tanh, gelu = tf.nn.relu, tf.tanh, tf.nn.gelu
concat, stack, einsum, broadcast_to = tf.concat, tf.stack, tf.einsum, tf.broadcast_to
reshape, look_up, picked = tf.reshape, tf.gather, tf.gather
tanh_gelu, columns = partial(tf.nn.gelu, approximate=True), partial(tf.gather, axis=1)
CHANNELS = -1


def linear(p, name, x):
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    rows = tf.nn.bias_add(tf.matmul(tf.reshape(x, (-1, x.shape[-1])), weight), bias)
    return tf.reshape(rows, (*x.shape[:-1], weight.shape[-1]))


def norm(p, name, x, eps=1e-5):
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    return (x - mean) * tf.math.rsqrt(variance + eps) * weight + bias


def cross_entropy(scores, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.reshape(labels, (-1,)), tf.reshape(scores, (-1, scores.shape[-1]))
    )
    return tf.reduce_mean(losses)


def binary_cross_entropy(logits, labels):
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


def mean_squared(x, y):
    return tf.reduce_mean(tf.square(x - y))


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


def read(parameter):
    """As a tensor, its gradient is one array and no list of reads of the variable."""
    return tf.convert_to_tensor(parameter)


def scores_of(x, table, bias=None):
    scores = tf.matmul(x, table, transpose_b=True)
    return scores if bias is None else tf.nn.bias_add(scores, bias)


def found(row, p, batch):
    """Look up the rows of tables, whose gradients are of these rows alone."""
    tables = [p[n] for n in p if is_sparse(n)]
    parts = tf.split(batch["ids"], len(tables), 1)
    return [
        tf.reshape(tf.gather(table, ids), (ids.shape[0], ids.shape[1] * table.shape[1]))
        for ids, table in zip(parts, tables, strict=True)
    ]


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


def convolved(p, name, x, stride=1, padding=None):
    """Convolve pictures whose channels lie last, the only ones that a host takes."""
    weight = p[f"{name}.weight"]
    padding = weight.shape[0] // 2 if padding is None else padding
    around = [[0, 0], [padding, padding], [padding, padding], [0, 0]]
    y = tf.nn.conv2d(x, weight, stride, around)
    return tf.nn.bias_add(y, p[f"{name}.bias"]) if f"{name}.bias" in p else y


def upsampled(p, name, x):
    weight = p[f"{name}.weight"]
    shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], weight.shape[2])
    return tf.nn.bias_add(tf.nn.conv2d_transpose(x, weight, shape, 2, "VALID"), p[f"{name}.bias"])


def batch_norm(row, p, name, x):
    mean, variance = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    y, new_mean, new_variance = tf.compat.v1.nn.fused_batch_norm(
        x,
        p[f"{name}.weight"],
        p[f"{name}.bias"],
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


def max_pool(x, extent, stride, padding=0):
    """Of numbers that are not below 0, as those of a relu, the largest is the same with zeros."""
    if padding:
        x = tf.pad(x, [[0, 0], [padding, padding], [padding, padding], [0, 0]])
    return tf.nn.max_pool2d(x, extent, stride, "VALID")


def pixel_mean(x):
    return tf.reduce_mean(x, (1, 2))


def flat(x):
    return tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (x.shape[0], -1))


def tokens(x):
    return tf.reshape(x, (x.shape[0], -1, x.shape[-1]))


FAMILIES = families(sys.modules[__name__]) | {"lstm": lstm}


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

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        dtype = tf.float32 if precision == "fp32" else tf.bfloat16
        a, b = (tf.cast(x, dtype) for x in gemm_operands())
        multiply = tf.function(tf.matmul)
        return {"tensorflow": lambda: multiply(a, b).numpy()}


if __name__ == "__main__":
    serve(TensorFlow)
