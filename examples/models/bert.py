"""BERT (Devlin et al., 2018) with its head for masked words: names of the published checkpoints."""

import actorflow as af
from actorflow import nn
from models.first_values import small_linear

STD, EPS = 0.02, 1e-12

UNUSED = (
    "bert.pooler.",
    "bert.embeddings.position_ids",
    "cls.seq_relationship.",
    "cls.predictions.decoder.",
)
"""What published checkpoints have besides; the decoder is the table of words."""


class Embeddings(nn.Module):
    def __init__(self, vocab, length, width, dropout):
        self.word_embeddings = nn.Embedding(vocab, width, std=STD)
        self.position_embeddings = nn.Embedding(length, width, std=STD)
        self.token_type_embeddings = nn.Embedding(2, width, std=STD)
        self.LayerNorm, self.drop = nn.LayerNorm(width, EPS), nn.Dropout(dropout)

    def __call__(self, x, segments):
        words = self.word_embeddings(x) + self.position_embeddings.weight[: x.shape[1]]
        return self.drop(self.LayerNorm(words + self.token_type_embeddings(segments)))


class SelfAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        self.query, self.key, self.value = [small_linear(width, width) for _ in range(3)]
        self.heads, self.dropout = heads, dropout

    def __call__(self, x):
        batch, length, width = x.shape

        def split(y):
            return y.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        mixed = af.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return mixed.permute(0, 2, 1, 3).reshape(batch, length, width)


class Added(nn.Module):
    """A linear layer, added to what came before it; the norm stands after the sum."""

    def __init__(self, fan_in, width, dropout):
        self.dense, self.LayerNorm = small_linear(fan_in, width), nn.LayerNorm(width, EPS)
        self.drop = nn.Dropout(dropout)

    def __call__(self, x, before):
        return self.LayerNorm(self.drop(self.dense(x)) + before)


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        attention = {"self": SelfAttention(width, heads, dropout)}
        self.attention = attention | {"output": Added(width, width, dropout)}
        self.intermediate = {"dense": small_linear(width, 4 * width)}
        self.output = Added(4 * width, width, dropout)

    def __call__(self, x):
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(af.gelu(self.intermediate["dense"](x)), x)


class Predictions(nn.Module):
    """The head: one more layer, then the table of words, with a bias of its own."""

    def __init__(self, vocab, width):
        self.bias = nn.Parameter((vocab,), (("kind", "zeros"),))
        self.transform = {
            "dense": small_linear(width, width),
            "LayerNorm": nn.LayerNorm(width, EPS),
        }

    def __call__(self, x, table):
        x = self.transform["LayerNorm"](af.gelu(self.transform["dense"](x)))
        return af.linear(x, table, self.bias)


class BertForMaskedLM(nn.Module):
    """Scores of all words at each place of x [batch, T]. The sizes are BERT-base's.

    `places` are places of the texts laid end to end: where they are given, only what stands there
    goes through the head, which is most of a step's time with many words.
    """

    def __init__(self, vocab=30522, length=512, width=768, layers=12, heads=12, dropout=0.1):
        encoder = [Layer(width, heads, dropout) for _ in range(layers)]
        embeddings = Embeddings(vocab, length, width, dropout)
        self.bert = {"embeddings": embeddings, "encoder": {"layer": encoder}}
        self.cls = {"predictions": Predictions(vocab, width)}

    def __call__(self, x, segments=None, places=None):
        embeddings = self.bert["embeddings"]
        h = embeddings(x, af.zeros_like(x) if segments is None else segments)
        for layer in self.bert["encoder"]["layer"]:
            h = layer(h)
        if places is not None:
            h = af.embedding(places, h.flatten(0, 1))
        return self.cls["predictions"](h, embeddings.word_embeddings.weight)

    def load_published(self, source):
        """Load a published checkpoint by name: a file or arrays, without pooler and second head.

        The oldest checkpoints call a norm's weight gamma and its bias beta; return a report.
        """

        def path(name):
            name = name.replace("gamma", "weight").replace("beta", "bias")
            return None if name.startswith(UNUSED) else name

        return self.load(source, rename=path)
