"""One GPT in two engines: the same sizes, initial weights, data and optimizer.

    python benchmarks/gpt_jobs.py actorflow|actorflow-eager|torch|torch-checkpoint
        [--layers 6] [--steps 4] [--budget BYTES] [--recompute auto]

Runs a few training steps in this process and prints one line of JSON: losses, a hash of the trained
parameters, median ms per step, and bytes. `above_bytes` is the peak of the resident set during the
steps after the first, less what was resident before the model was made, less parameters and AdamW's
two moments. The first step is left out, since both engines make their state in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDTH, HEADS, SEQ, BATCH, VOCAB = 384, 6, 256, 8, 65
RATE, DECAY = 1e-3, 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "engine", choices=("actorflow", "actorflow-eager", "torch", "torch-checkpoint")
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--recompute", default="auto")
    args = parser.parse_args()
    if args.engine == "actorflow":
        report = run_actorflow(args.layers, args.steps, args.budget, args.recompute)
    elif args.engine == "actorflow-eager":
        report = run_eager(args.layers, args.steps)
    else:
        report = run_torch(args.layers, args.steps, is_checkpointed=args.engine != "torch")
    print(json.dumps(report))


def tokens() -> np.ndarray:
    """Return a text with some structure, so that the loss falls."""
    rng = np.random.default_rng(0)
    return (np.cumsum(rng.integers(0, 5, 100_000)) % VOCAB).astype(np.uint8)


def make_job(memory_budget: int | None = None, recompute: str = "auto"):
    """Return the training job."""
    import actorflow as af

    @af.job(
        optimizer=af.optim.AdamW(RATE, weight_decay=DECAY),
        memory_budget=memory_budget,
        recompute=recompute,
    )
    def gpt(model, batch):
        return af.cross_entropy(model(batch.x).flatten(0, -2), batch.y.flatten())

    return gpt


def make_model(layers: int):
    """Return the model; its weights are the same in every process."""
    import actorflow as af
    from actorflow import nn

    class GPT(nn.Module):
        def __init__(self):
            self.emb = nn.Embedding(VOCAB, WIDTH, std=0.02)
            self.pos = nn.Embedding(SEQ, WIDTH, std=0.02)
            self.blocks = [
                nn.TransformerBlock(WIDTH, heads=HEADS, causal=True) for _ in range(layers)
            ]
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

        def __call__(self, x):
            h = self.emb(x) + self.pos.weight
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h))

    model = GPT()
    rng = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        shape = parameter.type.shape
        norm = "norm" in name and name.endswith("weight")
        array = np.ones(shape) if norm else rng.normal(0, 0.02, shape)
        parameter.load(array.astype(np.float32))
    return model, af.data.Tokens(tokens(), seq=SEQ, batch=BATCH, seed=0)


def run_actorflow(layers: int, steps: int, budget: int | None, recompute: str) -> dict:
    from compiler.pipeline.printer import summarise

    warm_blas()
    model_and_data = make_model(layers)
    base = resident_bytes() - state_bytes(model_and_data[0]) // 3
    job = make_job(budget, recompute)
    model, data = model_and_data
    plan = job.compile(model, data)
    losses, times, peak = [], [], []

    def listen(step, metrics):
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter())
        if step == 1:
            forget_peak()
        if step == steps:
            peak.append(peak_bytes())

    job.fit(model, data, steps=steps, progress=False, on_step=listen)
    names = dict(model.named_parameters())
    account = plan.memory[0]
    again = plan.recomputation[0] if plan.recomputation else None
    return {
        "engine": "actorflow",
        "losses": losses,
        "hash": parameter_hash([names[n].data for n in names]),
        "ms": step_ms(times),
        "state_bytes": state_bytes(model),
        # The model's own copy of the parameters is no part of training; a rival has none.
        "above_bytes": peak[0] - base - state_bytes(model) - state_bytes(model) // 3,
        "arena_bytes": account.peak_bytes,
        "step_bytes": account.step_bytes,
        "extra": again.extra if again else 0.0,
        "plan": summarise(plan),
    }


def run_eager(layers: int, steps: int) -> dict:
    """Train by `eager_step`; the first step plans and builds what the others find."""
    warm_blas()
    model, data = make_model(layers)
    base = resident_bytes() - state_bytes(model) // 3
    job = make_job()
    losses, times = [], []
    for step in range(steps):
        losses.append(job.eager_step(model, next(data))["loss"])
        times.append(time.perf_counter())
        if step == 0:
            forget_peak()
    names = dict(model.named_parameters())
    return {
        "engine": "actorflow-eager",
        "losses": losses,
        "hash": parameter_hash([names[n].data for n in names]),
        "ms": step_ms(times),
        "state_bytes": state_bytes(model),
        "above_bytes": peak_bytes() - base - state_bytes(model) - state_bytes(model) // 3,
    }


def run_torch(layers: int, steps: int, *, is_checkpointed: bool) -> dict:
    import torch
    from torch.nn import functional as f
    from torch.utils.checkpoint import checkpoint

    source, data = make_model(layers)
    weights = {n: p.data for n, p in source.named_parameters()}

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.qkv, self.proj = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.up, self.down = (
                torch.nn.Linear(WIDTH, 4 * WIDTH),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm1(x)).split(d, dim=2)
            q, k, v = (a.view(b, t, HEADS, d // HEADS).transpose(1, 2) for a in (q, k, v))
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
            return x + self.down(f.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Net(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.emb, self.pos = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Embedding(SEQ, WIDTH)
            self.blocks = torch.nn.ModuleList([Block() for _ in range(layers)])
            self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCAB)

        def forward(self, x):
            h = self.emb(x) + self.pos.weight[: x.shape[1]]
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False) if is_checkpointed else block(h)
            return self.head(self.norm(h))

    def train(net, optimizer, x, y):
        loss = f.cross_entropy(net(x).view(-1, VOCAB), y.view(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    # What torch loads and makes at its first step belongs to no job: a small one comes first.
    small = Net(1)
    small_x = torch.zeros((1, 16), dtype=torch.int64)
    train(small, torch.optim.AdamW(small.parameters(), lr=RATE, fused=True), small_x, small_x)
    del small
    base = resident_bytes()
    net = Net(layers)
    params = dict(net.named_parameters())
    for name, array in weights.items():
        with torch.no_grad():
            params[name.replace(".attn.", ".").replace(".mlp.", ".")].copy_(torch.from_numpy(array))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY, fused=True)
    losses, times = [], []
    for step in range(steps):
        batch = next(data)
        x, y = (torch.from_numpy(np.asarray(batch[k])).long() for k in ("x", "y"))
        losses.append(train(net, optimizer, x, y))
        times.append(time.perf_counter())
        if step == 0:
            forget_peak()
    state = state_bytes(source)
    return {
        "engine": "torch-checkpoint" if is_checkpointed else "torch",
        "losses": losses,
        "ms": step_ms(times),
        "state_bytes": state,
        "above_bytes": peak_bytes() - base - state,
        "gradient_bytes": state // 3,
    }


def warm_blas() -> None:
    """Let the BLAS make its buffers before anything is measured."""
    a = np.ones((2048, 512), np.float32)
    np.matmul(a, a.T)


def state_bytes(model) -> int:
    """Return the bytes of parameters and AdamW's two moments."""
    return 3 * 4 * model.num_parameters()


def parameter_hash(arrays) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def step_ms(times: list[float]) -> float:
    gaps = [(b - a) * 1e3 for a, b in pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def forget_peak() -> None:
    """Let the peak of the resident set start anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
