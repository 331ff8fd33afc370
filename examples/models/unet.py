"""U-Net (Ronneberger et al., 2015): down and up again, every level joined with its twin.

As most do today it pads its convolutions and normalises after each, so that the answer has the size
of the picture; sides must be divisible by 2 to the number of levels.
"""

from itertools import pairwise

import actorflow as af
from actorflow import nn


class DoubleConv(nn.Sequential):
    """Twice: a 3 x 3 convolution, batch norm, ReLU."""

    def __init__(self, channels, results):
        super().__init__(
            nn.Conv2d(channels, results, 3, padding=1, bias=False),
            nn.BatchNorm2d(results),
            nn.ReLU(),
            nn.Conv2d(results, results, 3, padding=1, bias=False),
            nn.BatchNorm2d(results),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """x [N, channels, H, W] -> scores of each pixel [N, num_classes, H, W].

    `width` are the channels of the first level; each of the `depth` levels below has twice as many.
    31 M parameters with 64 and 4, as published.
    """

    def __init__(self, num_classes, *, channels=1, width=64, depth=4):
        widths = [width << level for level in range(depth + 1)]
        self.inc = DoubleConv(channels, width)
        self.down = nn.ModuleList([DoubleConv(a, b) for a, b in pairwise(widths)])
        below = widths[:0:-1]
        self.up = nn.ModuleList([nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in below])
        self.join = nn.ModuleList([DoubleConv(w, w // 2) for w in below])
        self.outc = nn.Conv2d(width, num_classes, 1)

    def __call__(self, x):
        h, twins = self.inc(x), []
        for level in self.down:
            twins.append(h)
            h = level(af.max_pool2d(h, 2))
        for up, join in zip(self.up, self.join, strict=True):
            h = join(af.concat([twins.pop(), up(h)], axis=1))
        return self.outc(h)
