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
from rows.row import Row, is_buffer, is_sparse
from torch.nn import functional as f

from engines.serve import (
    gemm_operands,
    mean_square,
    num_threads,
    round_robin,
    serve,
)
from engines.structure import families, hidden

Parameters = dict[str, torch.Tensor]
CHANNELS_LAST = "channels_last"
"""A word of a variant: pictures and kernels lie with their channels last."""

relu, tanh, gelu = f.relu, torch.tanh, f.gelu
concat, stack, einsum, broadcast_to = torch.cat, torch.stack, torch.einsum, torch.broadcast_to
reshape, mean_squared, scores_of = torch.reshape, f.mse_loss, f.linear
tanh_gelu = partial(f.gelu, approximate="tanh")
CHANNELS = 1


def linear(p: Parameters, name: str, x):
    return f.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def norm(p: Parameters, name: str, x, eps: float = 1e-5):
    return f.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)


def attend(p: Parameters, prefix: str, x, heads: int, is_causal: bool):
    b, t, d = x.shape
    q, k, v = linear(p, f"{prefix}attn.qkv", x).split(d, dim=2)
    q, k, v = (a.view(b, t, heads, d // heads).transpose(1, 2) for a in (q, k, v))
    y = f.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return linear(p, f"{prefix}attn.proj", y.transpose(1, 2).reshape(b, t, d))


def look_up(table, ids):
    return f.embedding(ids, table)


def picked(rows, places):
    return rows[places]


def columns(x, places: list[int]):
    return x[:, places]


def read(parameter):
    return parameter


def found(row: Row, p: Parameters, batch):
    """Rows of tables, which were looked up before."""
    return batch["found"]


def cross_entropy(scores, labels):
    """Classes of pictures are axis 1, those of texts the last."""
    if scores.ndim < 4:
        scores, labels = scores.view(-1, scores.shape[-1]), labels.view(-1)
    return f.cross_entropy(scores.float(), labels)


def binary_cross_entropy(logits, labels):
    return f.binary_cross_entropy_with_logits(logits.float(), labels)


def convolved(p: Parameters, name: str, x, stride: int = 1, padding: int | None = None):
    weight = p[f"{name}.weight"]
    padding = weight.shape[-1] // 2 if padding is None else padding
    return f.conv2d(x, weight, p.get(f"{name}.bias"), stride=stride, padding=padding)


def upsampled(p: Parameters, name: str, x):
    return f.conv_transpose2d(x, p[f"{name}.weight"], p[f"{name}.bias"], stride=2)


def batch_norm(row: Row, p: Parameters, name: str, x):
    statistics = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    affine = p[f"{name}.weight"], p[f"{name}.bias"]
    return f.batch_norm(x, *statistics, *affine, training=row.is_training)


def max_pool(x, extent: int, stride: int, padding: int = 0):
    return f.max_pool2d(x, extent, stride, padding)


def pixel_mean(x):
    return x.mean((2, 3))


def flat(x):
    return x.flatten(1)


def tokens(x):
    return x.flatten(2).transpose(1, 2)


def chunked_gpt(row: Row, p: Parameters, batch):
    """The same loss without the logits of a whole batch: torch's own chunks of rows."""
    h = hidden(_LAYERS, row, p, batch["x"])
    return f.linear_cross_entropy(
        h.view(-1, h.shape[-1]),
        p["head.weight"],
        batch["y"].view(-1),
        linear_bias=p["head.bias"],
        options=torch.nn.LinearCrossEntropyOptions(),
    )


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


_LAYERS = sys.modules[__name__]
FAMILIES = families(_LAYERS) | {"lstm": lstm}


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
            if self.device == "cuda" and not self.row.is_training:  # an answer is waited for
                torch.cuda.synchronize()
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
        tables = [n for n in parameters if is_sparse(n)]
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
                parts = batch["ids"].chunk(len(tables), 1)
                rows = [
                    f.embedding(ids, parameters[n], sparse=True).flatten(1)
                    for ids, n in zip(parts, tables, strict=True)
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

    def gemm(self, precision: str) -> dict[str, Callable[[], object]]:
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        a, b = (torch.from_numpy(x).to(dtype) for x in gemm_operands())
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
