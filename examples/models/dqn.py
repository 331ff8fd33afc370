"""A deep Q-network (Mnih et al., 2015) for states of a few numbers, and the one it learns from."""

from itertools import pairwise

import actorflow as af
from actorflow import nn


class QNetwork(nn.Module):
    """Values [batch, actions] of all actions in some states [batch, size]."""

    def __init__(self, size=4, actions=2, width=128):
        widths = (size, width, width)
        self.hidden = [nn.Linear(a, b) for a, b in pairwise(widths)]
        self.head = nn.Linear(width, actions)

    def __call__(self, x):
        for layer in self.hidden:
            x = af.relu(layer(x))
        return self.head(x)


class DQN(nn.Module):
    """Two such networks: `online` acts and is trained, `target` follows it.

    A job that trains says `trainable=["online.*"]`: `target` changes in `follow` alone.
    """

    def __init__(self, size=4, actions=2, width=128):
        self.online, self.target = [QNetwork(size, actions, width) for _ in range(2)]

    def __call__(self, x):
        return self.online(x)

    def loss(self, batch, discount=0.99):
        """Return the Huber loss of what was expected of actions against what came of them.

        What will come is what `target` says of the action that `online` would choose (van Hasselt
        et al., 2016); chosen by `target` itself, it would be too much.
        """
        rows = batch.action.to("int64").unsqueeze(1)
        expected = self.online(batch.state).gather(1, rows).squeeze(1)
        choice = self.online(batch.after).argmax(1).unsqueeze(1)
        later = self.target(batch.after).gather(1, choice).squeeze(1)
        return af.smooth_l1_loss(
            expected, (batch.reward + discount * batch.goes_on * later).detach()
        )

    def follow(self, share=1.0):
        """Move `target` towards `online` by a share of the difference; 1 copies it."""
        now, old = self.online.state(), self.target.state()
        self.target.load({n: old[n] + old[n].dtype.type(share) * (now[n] - old[n]) for n in now})
