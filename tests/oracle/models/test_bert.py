"""BERT with its masked words against torch's own post-norm layers and attention."""

import numpy as np
from bert_masked import SEQ, masked
from curves import Curve, adamw
from models.bert import BertForMaskedLM
from texts import read_text

import actorflow as af

VOCAB, WIDTH, LAYERS, HEADS = 128, 16, 2, 2


def batch(step):
    made = masked(read_text()[:2000], np.random.default_rng(step % 4), batch=2)
    return made | {"segments": (made["x"] % 2).astype(np.int32)}


def torch_bert(torch):
    nn, f = torch.nn, torch.nn.functional

    def norm():
        return nn.LayerNorm(WIDTH, eps=1e-12)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            names = ("query", "key", "value")
            inner = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
            output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "LayerNorm": norm()})
            self.attention = nn.ModuleDict({"self": inner, "output": output})
            self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, 4 * WIDTH)})
            dense = nn.Linear(4 * WIDTH, WIDTH)
            self.output = nn.ModuleDict({"dense": dense, "LayerNorm": norm()})

        def forward(self, x):
            parts = [self.attention["self"][name] for name in ("query", "key", "value")]
            output = self.attention["output"]
            mixed, _ = f.multi_head_attention_forward(
                *[x.transpose(0, 1)] * 3, WIDTH, HEADS,
                torch.cat([part.weight for part in parts]),
                torch.cat([part.bias for part in parts]),
                None, None, False, 0.0, output["dense"].weight, output["dense"].bias,
                need_weights=False,
            )  # fmt: skip
            x = output["LayerNorm"](x + mixed.transpose(0, 1))
            up = f.gelu(self.intermediate["dense"](x))
            return self.output["LayerNorm"](self.output["dense"](up) + x)

    class Predictions(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.empty(VOCAB))
            self.transform = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH), "LayerNorm": norm()})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            tables = {"word_embeddings": VOCAB, "position_embeddings": SEQ}
            tables |= {"token_type_embeddings": 2}
            embeddings = {name: nn.Embedding(rows, WIDTH) for name, rows in tables.items()}
            layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
            parts = {"embeddings": nn.ModuleDict(embeddings | {"LayerNorm": norm()})}
            self.bert = nn.ModuleDict(parts | {"encoder": nn.ModuleDict({"layer": layers})})
            self.cls = nn.ModuleDict({"predictions": Predictions()})

        def forward(self, x, segments, places):
            own, head = self.bert["embeddings"], self.cls["predictions"]
            h = own["word_embeddings"](x) + own["token_type_embeddings"](segments)
            h = own["LayerNorm"](h + own["position_embeddings"](torch.arange(SEQ)))
            for layer in self.bert["encoder"]["layer"]:
                h = layer(h)
            h = f.gelu(head.transform["dense"](h.flatten(0, 1)[places]))
            h = head.transform["LayerNorm"](h)
            return f.linear(h, own["word_embeddings"].weight, head.bias)

    return Net()


CURVES = [
    Curve(
        "bert",
        lambda: BertForMaskedLM(VOCAB, SEQ, WIDTH, LAYERS, HEADS, dropout=0.0),
        torch_bert,
        lambda model, batch: af.cross_entropy(
            model(batch.x, batch.segments, batch.places), batch.y
        ),
        lambda torch, model, batch: torch.nn.functional.cross_entropy(
            model(batch["x"], batch["segments"], batch["places"]), batch["y"]
        ),
        batch,
        adamw(1e-3),
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
