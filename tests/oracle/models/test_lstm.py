"""The LSTM language model against torch's own layers."""

import numpy as np
from curves import Curve, Optimized
from models.lstm_lm import LSTMLanguageModel
from texts import read_text

import actorflow as af

VOCAB, SEQ, TEXTS, WIDTH, HIDDEN = 128, 12, 4, 8, 16


def batch(step):
    rows = read_text()[(step % 4) * 1000 :][: TEXTS * (SEQ + 1)].reshape(TEXTS, SEQ + 1)
    return {"x": rows[:, :-1].astype(np.int32), "y": rows[:, 1:].astype(np.int32)}


def torch_model(torch):
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(VOCAB, WIDTH)
            self.rnn = nn.LSTM(WIDTH, HIDDEN, 2, batch_first=True)
            self.decoder = nn.Linear(HIDDEN, VOCAB)

        def forward(self, x):
            return self.decoder(self.rnn(self.encoder(x))[0])

    return Net()


ADAM = (Optimized(af.optim.Adam(1e-2), lambda torch, params: torch.optim.Adam(params, 1e-2)),)

CURVES = [
    Curve(
        "lstm",
        lambda: LSTMLanguageModel(VOCAB, WIDTH, HIDDEN, dropout=0.0),
        torch_model,
        lambda model, batch: af.cross_entropy(model(batch.x).flatten(0, 1), batch.y.flatten()),
        lambda torch, model, batch: torch.nn.functional.cross_entropy(
            model(batch["x"]).flatten(0, 1), batch["y"].flatten()
        ),
        batch,
        ADAM,
        ("float32", "bfloat16"),
    )
]


def test_it_learns_as_in_torch(learns_as_torch, curve, precision):
    learns_as_torch(curve, precision)
