"""GPT-2 and a LLaMA-style model against the same written in torch.

Masks and softmax are written out, and rotary positions turn complex numbers.
"""

import numpy as np
from curves import Curve, adamw
from models.gpt2 import GPT2
from models.llama import Llama
from texts import read_text

import actorflow as af

VOCAB, SEQ, WIDTH, LAYERS, HEADS = 128, 16, 32, 2, 4
SIZE, KV_HEADS, HIDDEN = WIDTH // HEADS, 2, 48


def batch(step, texts=4):
    """Return some lines of the standard library, the same four batches again and again."""
    rows = read_text()[(step % 4) * 1000 :][: texts * (SEQ + 1)].reshape(texts, SEQ + 1)
    return {"x": rows[:, :-1].astype(np.int32), "y": rows[:, 1:].astype(np.int32)}


def loss(model, batch):
    return af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten())


def torch_loss(torch, model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def mixed(torch, q, k, v):
    """Return what each place [batch, heads, SEQ, SIZE] takes of those up to it, heads joined."""
    scores = q @ k.transpose(-1, -2) / SIZE**0.5
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    found = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return found.transpose(1, 2).flatten(2)


def torch_gpt2(torch):
    nn, f = torch.nn, torch.nn.functional

    class Conv1D(nn.Module):
        def __init__(self, fan_in, fan_out):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(fan_in, fan_out))
            self.bias = nn.Parameter(torch.empty(fan_out))

        def forward(self, x):
            return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:-1], -1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            attn = {"c_attn": Conv1D(WIDTH, 3 * WIDTH), "c_proj": Conv1D(WIDTH, WIDTH)}
            mlp = {"c_fc": Conv1D(WIDTH, 4 * WIDTH), "c_proj": Conv1D(4 * WIDTH, WIDTH)}
            self.attn, self.mlp = nn.ModuleDict(attn), nn.ModuleDict(mlp)

        def attended(self, x):
            q, k, v = [
                part.view(*x.shape[:2], HEADS, SIZE).transpose(1, 2)
                for part in self.attn["c_attn"](x).split(WIDTH, dim=2)
            ]
            return self.attn["c_proj"](mixed(torch, q, k, v))

        def forward(self, x):
            x = x + self.attended(self.ln_1(x))
            up = f.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
            return x + self.mlp["c_proj"](up)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
            self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.ln_f = nn.LayerNorm(WIDTH)

        def forward(self, x):
            h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for block in self.h:
                h = block(h)
            return self.ln_f(h) @ self.wte.weight.T

    return Net()


def torch_llama(torch):
    nn, f = torch.nn, torch.nn.functional

    def linear(fan_in, fan_out):
        return nn.Linear(fan_in, fan_out, bias=False)

    def turned(x):
        """Turn pairs (i, i + SIZE / 2) as the complex numbers that they are."""
        pairs = torch.complex(*x.split(SIZE // 2, dim=-1))
        speeds = 10000.0 ** (-torch.arange(0, SIZE, 2).double() / SIZE)
        angles = torch.outer(torch.arange(x.shape[2]).double(), speeds)
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            own = {n: linear(WIDTH, WIDTH) for n in ("q_proj", "o_proj")}
            shared = {n: linear(WIDTH, KV_HEADS * SIZE) for n in ("k_proj", "v_proj")}
            self.self_attn = nn.ModuleDict(own | shared)
            mlp = {n: linear(WIDTH, HIDDEN) for n in ("gate_proj", "up_proj")}
            self.mlp = nn.ModuleDict(mlp | {"down_proj": linear(HIDDEN, WIDTH)})
            self.input_layernorm = nn.RMSNorm(WIDTH, eps=1e-5)
            self.post_attention_layernorm = nn.RMSNorm(WIDTH, eps=1e-5)

        def attended(self, x):
            q, k, v = [
                self.self_attn[name](x).view(*x.shape[:2], -1, SIZE).transpose(1, 2)
                for name in ("q_proj", "k_proj", "v_proj")
            ]
            k, v = [part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v)]
            return self.self_attn["o_proj"](mixed(torch, turned(q), turned(k), v))

        def forward(self, x):
            x = x + self.attended(self.input_layernorm(x))
            h = self.post_attention_layernorm(x)
            gated = f.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h)
            return x + self.mlp["down_proj"](gated)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            embeddings = {"embed_tokens": nn.Embedding(VOCAB, WIDTH)}
            layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
            rest = {"layers": layers, "norm": nn.RMSNorm(WIDTH, eps=1e-5)}
            self.model = nn.ModuleDict(embeddings | rest)
            self.lm_head = linear(WIDTH, VOCAB)

        def forward(self, x):
            h = self.model["embed_tokens"](x)
            for layer in self.model["layers"]:
                h = layer(h)
            return self.lm_head(self.model["norm"](h))

    return Net()


def gpt2():
    return GPT2(VOCAB, SEQ, WIDTH, LAYERS, HEADS, dropout=0.0)


def llama():
    return Llama(VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN)


CURVES = [
    Curve(name, ours, torchs, loss, torch_loss, batch, adamw(1e-3), ("float32", "bfloat16"))
    for name, ours, torchs in (("gpt2", gpt2, torch_gpt2), ("llama", llama, torch_llama))
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
