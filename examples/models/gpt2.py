"""GPT-2 (Radford et al., 2019): names, layouts and first values of the published checkpoints."""

import actorflow as af
from actorflow import nn
from models.generation import LanguageModel

STD = 0.02


class Conv1D(nn.Module):
    """x @ weight + bias with the weight as [in, out], which is how the checkpoints keep it."""

    def __init__(self, fan_in, fan_out, std=STD):
        self.weight = nn.Parameter((fan_in, fan_out), (("kind", "normal"), ("std", std)))
        self.bias = nn.Parameter((fan_out,), (("kind", "zeros"),))

    def __call__(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, width, heads, dropout, residual_std):
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width, residual_std)
        self.heads, self.dropout = heads, dropout

    def __call__(self, x, kept=None, place=None):
        batch, length, width = x.shape
        parts = self.c_attn(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        if kept is None:
            mixed = af.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        else:
            mixed = kept.attend(q, k, v, place)
        return self.c_proj(mixed.permute(0, 2, 1, 3).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width, residual_std):
        self.c_fc, self.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width, residual_std)

    def __call__(self, x):
        return self.c_proj(af.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads, dropout, residual_std):
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout, residual_std)
        self.mlp = MLP(width, residual_std)
        self.drop = nn.Dropout(dropout)

    def __call__(self, x, kept=None, place=None):
        x = x + self.drop(self.attn(self.ln_1(x), kept, place))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT2(LanguageModel):
    """Scores of the next word at each place of x [batch, T], T at most `length`.

    The sizes are those of GPT-2 small. The table of words is the head too, and projections that
    end in a sum start smaller, the more sums there are, so that the sum's size does not grow.
    """

    def __init__(self, vocab=50257, length=1024, width=768, layers=12, heads=12, dropout=0.1):
        self.wte, self.wpe = (
            nn.Embedding(vocab, width, std=STD),
            nn.Embedding(length, width, std=STD),
        )
        self.vocab, self.length, self.kept = vocab, length, (layers, heads, width // heads)
        residual_std = STD / (2 * layers) ** 0.5
        self.h = [Block(width, heads, dropout, residual_std) for _ in range(layers)]
        self.ln_f, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)

    def features(self, x, layers=None, place=None):
        """Return [batch, T, width] of tokens, and keep what `layers` keep; see `LanguageModel`."""
        places = self.wpe.weight[: x.shape[1]] if place is None else self.wpe(place.reshape(-1, 1))
        h = self.drop(self.wte(x) + places)
        for block, kept in zip(self.h, layers or [None] * len(self.h), strict=True):
            h = block(h, kept, place)
        return self.ln_f(h)

    def head(self, features):
        return af.linear(features, self.wte.weight)

    def load_published(self, source):
        """Load a published checkpoint by name: a file or arrays, without masks; return a report.

        Some have a prefix before each name, and some the table of words as the head, too.
        """

        def path(name):
            name = name.removeprefix("transformer.")
            is_mask = name.endswith((".attn.bias", ".attn.masked_bias")) or name == "lm_head.weight"
            return None if is_mask else name

        return self.load(source, rename=path)
