"""torch, eager and compiled, at its best: fused optimizers, sparse tables, fused attention.

On a GPU batches lie there before the clock starts, and float32 products are not rounded to TF32, as
ours are not.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rows.row import Row, is_buffer, is_table
from torch.nn import functional as f

from engines.serve import (
    gemm_operands,
    mean_square,
    num_threads,
    round_robin,
    serve,
)
from engines.structure import resnet_features

Parameters = dict[str, torch.Tensor]
CHANNELS_LAST = "channels_last"
"""A word of a variant: pictures and kernels lie with their channels last."""


def linear(p: Parameters, name: str, x):
    return f.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(p: Parameters, name: str, x):
    return f.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])


def chain(row: Row, p: Parameters, x):
    last = row.sizes["layers"] - 1
    for i in range(last):
        x = f.relu(linear(p, f"layers.{i}", x))
    return linear(p, f"layers.{last}", x)


def attend(p: Parameters, prefix: str, x, heads: int, is_causal: bool):
    b, t, d = x.shape
    q, k, v = linear(p, f"{prefix}attn.qkv", x).split(d, dim=2)
    q, k, v = (a.view(b, t, heads, d // heads).transpose(1, 2) for a in (q, k, v))
    y = f.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return linear(p, f"{prefix}attn.proj", y.transpose(1, 2).reshape(b, t, d))


def feed_forward(p: Parameters, prefix: str, x):
    up = linear(p, f"{prefix}mlp.up", x)
    return linear(p, f"{prefix}mlp.down", f.gelu(up, approximate="tanh"))


def block(p: Parameters, prefix: str, x, heads: int):
    x = x + attend(p, prefix, norm(p, f"{prefix}norm1", x), heads, is_causal=True)
    return x + feed_forward(p, prefix, norm(p, f"{prefix}norm2", x))


def bert_block(p: Parameters, prefix: str, x, heads: int):
    x = norm(p, f"{prefix}norm1", x + attend(p, prefix, x, heads, is_causal=False))
    return norm(p, f"{prefix}norm2", x + feed_forward(p, prefix, x))


def tiny(row: Row, p: Parameters, batch):
    x = batch["x"]
    for i in range(row.sizes["layers"]):
        h = x @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
        x = (torch.relu(h) if i % 2 else torch.tanh(h)) * p[f"layers.{i}.g"]
    return f.mse_loss(x, batch["y"])


def mlp(row: Row, p: Parameters, batch):
    return f.cross_entropy(chain(row, p, batch["x"]).float(), batch["y"])


def hidden(row: Row, p: Parameters, x):
    h = f.embedding(x, p["emb.weight"]) + p["pos.weight"]
    for i in range(row.sizes["layers"]):
        h = block(p, f"blocks.{i}.", h, row.sizes["heads"])
    return norm(p, "norm", h)


def gpt(row: Row, p: Parameters, batch):
    scores = linear(p, "head", hidden(row, p, batch["x"]))
    if not row.is_training:
        return scores
    return f.cross_entropy(scores.float().view(-1, scores.shape[-1]), batch["y"].view(-1))


def gpt2(row: Row, p: Parameters, batch):
    scores = f.linear(hidden(row, p, batch["x"]), p["emb.weight"])
    return f.cross_entropy(scores.float().view(-1, scores.shape[-1]), batch["y"].view(-1))


def bert(row: Row, p: Parameters, batch):
    h = f.embedding(batch["x"], p["emb.weight"]) + p["pos.weight"]
    h = norm(p, "first", h + f.embedding(batch["segments"], p["segment.weight"]))
    for i in range(row.sizes["layers"]):
        h = bert_block(p, f"blocks.{i}.", h, row.sizes["heads"])
    masked = linear(p, "dense", h.view(-1, h.shape[-1])[batch["places"]])
    masked = norm(p, "last", f.gelu(masked, approximate="tanh"))
    return f.cross_entropy(f.linear(masked, p["emb.weight"], p["bias"]).float(), batch["y"])


def chunked_gpt(row: Row, p: Parameters, batch):
    """The same loss without the logits of a whole batch: torch's own chunks of rows."""
    h = hidden(row, p, batch["x"])
    return f.linear_cross_entropy(
        h.view(-1, h.shape[-1]),
        p["head.weight"],
        batch["y"].view(-1),
        linear_bias=p["head.bias"],
        options=torch.nn.LinearCrossEntropyOptions(),
    )


def gpt2_block(row: Row, p: Parameters, batch):
    return f.mse_loss(block(p, "block.", p["x"], row.sizes["heads"]), batch["y"])


def wide_deep(row: Row, p: Parameters, batch):
    x = torch.cat([*batch["found"], batch["dense"]], dim=1)
    return f.cross_entropy(chain(row, p, x) + linear(p, "wide", batch["dense"]), batch["y"])


def lstm(row: Row, p: Parameters, batch):
    layers, width = row.sizes["layers"], row.sizes["width"]
    h = f.embedding(batch["x"], p["emb.weight"])
    zeros = h.new_zeros((layers, h.shape[1], width))
    names = [f"{n}_{s}_l{i}" for i in range(layers) for n in ("weight", "bias") for s in SIDES]
    weights = [p[f"lstm.{name}"] for name in names]
    h = torch.lstm(h, (zeros, zeros), weights, True, layers, 0.0, True, False, False)[0]
    scores = linear(p, "head", h)
    return f.cross_entropy(scores.view(-1, scores.shape[-1]), batch["y"].view(-1))


SIDES = ("ih", "hh")


def lenet(row: Row, p: Parameters, batch):
    x = f.max_pool2d(f.relu(f.conv2d(batch["x"], p["conv1.weight"], p["conv1.bias"], padding=2)), 2)
    x = f.max_pool2d(f.relu(f.conv2d(x, p["conv2.weight"], p["conv2.bias"])), 2)
    x = f.relu(linear(p, "fc1", x.flatten(1)))
    return f.cross_entropy(linear(p, "fc3", f.relu(linear(p, "fc2", x))).float(), batch["y"])


def resnet(row: Row, p: Parameters, batch):
    def convolved(conv: str, norm: str, x, stride: int):
        weight = p[f"{conv}.weight"]
        x = f.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        statistics = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        affine = p[f"{norm}.weight"], p[f"{norm}.bias"]
        return f.batch_norm(x, *statistics, *affine, training=row.is_training)

    pool = partial(f.max_pool2d, kernel_size=3, stride=2, padding=1)
    is_large = p["conv1.weight"].shape[-1] == 7
    x = resnet_features(p, batch["x"], convolved, f.relu, pool if is_large else None)
    scores = linear(p, "fc", x.mean((2, 3)))
    return f.cross_entropy(scores.float(), batch["y"]) if row.is_training else scores


FAMILIES = {
    f.__name__: f for f in (tiny, mlp, gpt, gpt2, bert, gpt2_block, wide_deep, lstm, lenet, resnet)
}


@dataclass(slots=True)
class Session:
    row: Row
    parameters: Parameters
    loss: Callable[[dict], torch.Tensor]
    optimizers: tuple[torch.optim.Optimizer, ...]
    next_batch: Callable[[], dict]
    settings: str
    device: str

    def advance(self):
        if self.device == "cuda":
            # What was captured by reduce-overhead may be replayed over results of the last step.
            torch.compiler.cudagraph_mark_step_begin()
        batch = self.next_batch()
        if not self.row.is_training:
            with torch.inference_mode():
                return self.loss(batch)
        loss = self.loss(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def step(self) -> float:
        output = self.advance()
        return output.item() if self.row.is_training else mean_square(output.float().cpu().numpy())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.advance()
        if self.device == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> dict[str, object]:
        return {"settings": self.settings}


class Torch:
    def __init__(self) -> None:
        torch.set_num_threads(num_threads())

    def prepare(self, row: Row, precision: str, variant: str, device: str) -> Session:
        place = "cpu" if device == "host" else device
        words = variant.split()
        layout = torch.channels_last if CHANNELS_LAST in words else torch.contiguous_format
        variant = next((word for word in words if word != CHANNELS_LAST), "eager")

        def placed(array):
            tensor = torch.from_numpy(array).to(place)
            return tensor.to(memory_format=layout) if array.ndim == 4 else tensor

        parameters = {
            n: placed(a).requires_grad_(row.is_training and not is_buffer(n))
            for n, a in row.weights().items()
        }
        batches = [
            {n: placed(a).long() if a.dtype.kind == "i" else placed(a) for n, a in batch.items()}
            for batch in row.batches()
        ]
        where = f"{torch.get_num_threads()} threads" if device == "host" else _gpu_name()
        settings = [f"torch {torch.__version__}, {where}"]
        settings += [CHANNELS_LAST] if CHANNELS_LAST in words else []
        tables = [n for n in parameters if row.family == "wide_deep" and is_table(n)]
        function = chunked_gpt if variant == "chunked" else FAMILIES[row.family]
        arithmetic = {n: p for n, p in parameters.items() if n not in tables}

        def plain(batch):
            with autocast(place, precision):
                return function(row, arithmetic, batch)

        loss = plain
        if variant == "chunked":
            settings.append("nn.functional.linear_cross_entropy in chunks")
        elif variant != "eager":
            mode = None if variant == "default" else variant
            loss = torch.compile(plain, mode=mode, dynamic=False)
            settings.append(f"torch.compile mode={variant}")
        if tables:
            # The look-ups stand before what is compiled: sparse gradients are made by eager mode.
            dense_loss = loss

            def loss(batch):
                columns = batch["ids"].unbind(1)
                rows = [
                    f.embedding(ids, parameters[n], sparse=True)
                    for ids, n in zip(columns, tables, strict=True)
                ]
                return dense_loss(batch | {"found": rows})

            settings.append("nn.functional.embedding(sparse=True)")
        changed = [p for p in arithmetic.values() if p.requires_grad]
        optimizers = _optimizers(row, changed, [parameters[n] for n in tables])
        if optimizers:
            settings.append(f"{type(optimizers[0]).__name__}(fused=True)")
        if precision == "bf16":
            settings.append("autocast bfloat16")
        about = ", ".join(settings)
        return Session(row, parameters, loss, optimizers, round_robin(batches), about, device)

    def gemm(self) -> dict[str, Callable[[], object]]:
        a, b = (torch.from_numpy(x) for x in gemm_operands())
        out = torch.empty_like(a)
        return {"torch": lambda: torch.mm(a, b, out=out)}


def autocast(place: str, precision: str):
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(place, torch.bfloat16)


def _gpu_name() -> str:
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no GPU")
    return torch.cuda.get_device_name()


def _optimizers(row: Row, dense: list, tables: list) -> tuple[torch.optim.Optimizer, ...]:
    spec = row.optimizer
    if spec.kind == "none":
        return ()
    if spec.kind == "adamw":
        kind = torch.optim.AdamW
        return (kind(dense, lr=spec.rate, weight_decay=spec.decay, fused=True),)
    optimizers = [torch.optim.SGD(dense, lr=spec.rate, fused=True)]
    if tables:
        optimizers.append(torch.optim.SGD(tables, lr=spec.rate))
    return tuple(optimizers)


if __name__ == "__main__":
    serve(Torch)
