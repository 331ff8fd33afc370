"""DLRM and Wide & Deep against torch, whose embeddings are bags of one id as in the original."""

from itertools import pairwise

from clicks import clicks
from curves import Curve, Optimized, sgd
from models.dlrm import DLRM
from models.wide_deep import WideDeep

import actorflow as af

ROWS, DENSE, DIM = (50, 20, 10), 5, 4
BOTTOM, TOP, WIDTHS = (16, 8), (16,), (16, 8, 2)
CLICKS, _ = clicks(128, ROWS, dense=DENSE)


def batch(step):
    rows = slice(step % 4 * 32, step % 4 * 32 + 32)
    return {name: array[rows] for name, array in CLICKS.items()}


def torch_dlrm(torch):
    nn = torch.nn

    def layers(widths):
        made = []
        for fan_in, fan_out in pairwise(widths):
            made += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return made

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb_l = nn.ModuleList([nn.EmbeddingBag(n, DIM, mode="sum") for n in ROWS])
            self.bot_l = nn.Sequential(*layers((DENSE, *BOTTOM, DIM)))
            num = DIM + (len(ROWS) + 1) * len(ROWS) // 2
            self.top_l = nn.Sequential(*layers((num, *TOP, 1))[:-1])

        def forward(self, dense, ids):
            x = self.bot_l(dense)
            features = [x] + [bag(ids[:, i, None]) for i, bag in enumerate(self.emb_l)]
            pairs = [(features[i] * features[j]).sum(1)
                     for i in range(len(features)) for j in range(i)]  # fmt: skip
            return self.top_l(torch.cat([x, torch.stack(pairs, 1)], 1))[:, 0]

    return Net()


def torch_wide_deep(torch):
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(n, DIM) for n in ROWS])
            widths = (len(ROWS) * DIM + DENSE, *WIDTHS)
            pairs = pairwise(widths)
            self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairs])
            self.wide = nn.Linear(DENSE, WIDTHS[-1])

        def forward(self, dense, ids):
            x = torch.cat([*[t(ids[:, i]) for i, t in enumerate(self.tables)], dense], 1)
            for layer in self.layers[:-1]:
                x = layer(x).relu()
            return self.layers[-1](x) + self.wide(dense)

    return Net()


ADAGRAD = (
    Optimized(af.optim.Adagrad(2e-2), lambda torch, params: torch.optim.Adagrad(params, 2e-2)),
)

CURVES = [
    Curve(
        "dlrm",
        lambda: DLRM(ROWS, DENSE, DIM, BOTTOM, TOP),
        torch_dlrm,
        lambda model, batch: af.binary_cross_entropy_with_logits(
            model(batch.dense, batch.ids), batch.y
        ),
        lambda torch, model, batch: torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch["dense"], batch["ids"]), batch["y"]
        ),
        batch,
        ADAGRAD,
        ("float32", "bfloat16"),
    ),
    Curve(
        "wide-deep",
        lambda: WideDeep(ROWS, DENSE, DIM, WIDTHS),
        torch_wide_deep,
        lambda model, batch: af.cross_entropy(model(batch.dense, batch.ids), batch.y.to("int64")),
        lambda torch, model, batch: torch.nn.functional.cross_entropy(
            model(batch["dense"], batch["ids"]), batch["y"].long()
        ),
        batch,
        sgd(0.1),
        ("float32", "bfloat16"),
    ),
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
