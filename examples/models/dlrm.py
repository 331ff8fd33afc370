"""DLRM (Naumov et al., 2019): will this be clicked? Names and first values as published."""

from itertools import pairwise

import numpy as np

import actorflow as af
from actorflow import nn


def layers(widths):
    """Return linear layers with relu between and after them, started as DLRM's are."""
    made = []
    for fan_in, fan_out in pairwise(widths):
        layer = nn.Linear(fan_in, fan_out)
        nn.init.xavier_normal_(layer.weight)
        nn.init.normal_(layer.bias, std=fan_out**-0.5)
        made += [layer, nn.ReLU()]
    return made


def table(rows, dim):
    """Return an embedding whose rows start uniform within 1 / sqrt(rows)."""
    made = nn.Embedding(rows, dim)
    nn.init.uniform_(made.weight, -(rows**-0.5), rows**-0.5)
    return made


class DLRM(nn.Module):
    """The logit of a click [batch], from dense features [batch, D] and ids [batch, tables].

    `bottom` and `top` are the widths of hidden layers; the dense features end as wide as a row of
    a table, so that each feature is one vector, and all pairs of them are multiplied.
    """

    def __init__(self, rows, dense=13, dim=16, bottom=(512, 256, 64), top=(512, 256)):
        self.emb_l = [table(n, dim) for n in rows]
        self.bot_l = nn.Sequential(layers((dense, *bottom, dim)))
        features = len(rows) + 1
        self.pairs = np.flatnonzero(np.tri(features, k=-1))
        self.top_l = nn.Sequential(layers((dim + len(self.pairs), *top, 1))[:-1])

    def __call__(self, dense, ids):
        x = self.bot_l(dense)
        found = [own(ids[:, i]) for i, own in enumerate(self.emb_l)]
        features = af.stack([x, *found], dim=1)
        products = (features @ features.swapaxes(1, 2)).flatten(1)
        pairs = products.index_select(1, self.pairs)
        return self.top_l(af.concat([x, pairs], dim=1)).squeeze(1)
