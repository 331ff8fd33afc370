"""A language model of LSTM layers (Zaremba et al., 2014), zeros before and after each in training.

Names and first values are those of torch's example word_language_model.
"""

from actorflow import nn


class LSTMLanguageModel(nn.Module):
    """x [batch, steps] of words -> scores [batch, steps, vocab]."""

    def __init__(self, vocab, width, hidden, layers=2, dropout=0.2):
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, hidden, layers, batch_first=True, dropout=dropout)
        self.decoder = nn.Linear(hidden, vocab)
        for layer in (self.encoder, self.decoder):
            nn.init.uniform_(layer.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def __call__(self, x):
        output, _ = self.rnn(self.drop(self.encoder(x)))
        return self.decoder(self.drop(output))
