"""A LLaMA-style model (Touvron et al., 2023): RMS norms, rotary positions, shared keys, SwiGLU.

Names and layouts are those of the published checkpoints for transformers.
"""

import actorflow as af
from actorflow import nn
from models.first_values import small_linear
from models.generation import LanguageModel

STD = 0.02


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads, base):
        self.heads, self.kv_heads, self.size, self.base = heads, kv_heads, width // heads, base
        self.q_proj = small_linear(width, heads * self.size, bias=False)
        self.k_proj = small_linear(width, kv_heads * self.size, bias=False)
        self.v_proj = small_linear(width, kv_heads * self.size, bias=False)
        self.o_proj = small_linear(heads * self.size, width, bias=False)

    def __call__(self, x, kept=None, place=None):
        batch, length, width = x.shape
        places = None if place is None else place.reshape(-1, 1, 1)

        def split(y, heads):
            return y.reshape(batch, length, heads, self.size).permute(0, 2, 1, 3)

        q = af.rotary(split(self.q_proj(x), self.heads), places, self.base)
        k = af.rotary(split(self.k_proj(x), self.kv_heads), places, self.base)
        v = split(self.v_proj(x), self.kv_heads)
        if kept is None:
            mixed = af.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = kept.attend(q, k, v, place)
        return self.o_proj(mixed.permute(0, 2, 1, 3).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width, hidden):
        self.gate_proj = small_linear(width, hidden, bias=False)
        self.up_proj = small_linear(width, hidden, bias=False)
        self.down_proj = small_linear(hidden, width, bias=False)

    def __call__(self, x):
        return self.down_proj(af.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden, base, eps):
        self.self_attn = Attention(width, heads, kv_heads, base)
        self.mlp = MLP(width, hidden)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)

    def __call__(self, x, kept=None, place=None):
        x = x + self.self_attn(self.input_layernorm(x), kept, place)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, kv_heads, hidden, base, eps):
        self.embed_tokens = nn.Embedding(vocab, width, std=STD)
        sizes = width, heads, kv_heads, hidden, base, eps
        self.layers = [DecoderLayer(*sizes) for _ in range(layers)]
        self.norm = nn.RMSNorm(width, eps)

    def __call__(self, x, layers=None, place=None):
        h = self.embed_tokens(x)
        for layer, kept in zip(self.layers, layers or [None] * len(self.layers), strict=True):
            h = layer(h, kept, place)
        return self.norm(h)


class Llama(LanguageModel):
    """Scores of the next word at each place of x [batch, T], for any T. The sizes are the 7 B's."""

    def __init__(
        self, vocab=32000, width=4096, layers=32, heads=32, kv_heads=32, hidden=11008,
        base=10000.0, eps=1e-5,
    ):  # fmt: skip
        self.vocab, self.length, self.kept = vocab, None, (layers, kv_heads, width // heads)
        self.model = Decoder(vocab, width, layers, heads, kv_heads, hidden, base, eps)
        self.lm_head = small_linear(width, vocab, bias=False)

    def features(self, x, layers=None, place=None):
        """Return [batch, T, width] of tokens, and keep what `layers` keep; see `LanguageModel`."""
        return self.model(x, layers, place)

    def head(self, features):
        return self.lm_head(features)
