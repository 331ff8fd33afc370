"""Wide & Deep (Cheng et al., 2016): one model remembers, the other generalises; both are added."""

from itertools import pairwise

import actorflow as af
from actorflow import nn


class WideDeep(nn.Module):
    """Logits [batch, classes], from dense features [batch, D] and ids [batch, tables].

    The deep half is an MLP of looked-up rows and dense features, whose last width is the classes;
    the wide half is a linear layer of the dense features.
    """

    def __init__(self, rows, dense=13, dim=16, widths=(256, 128, 2)):
        self.tables = [nn.Embedding(n, dim, std=0.1) for n in rows]
        all_widths = (len(rows) * dim + dense, *widths)
        self.layers = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(all_widths)]
        self.wide = nn.Linear(dense, widths[-1])

    def __call__(self, dense, ids):
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        x = af.concat([*found, dense], dim=1)
        for layer in self.layers[:-1]:
            x = af.relu(layer(x))
        return self.layers[-1](x) + self.wide(dense)
