"""A ResNet, said once for every engine that brings its own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def resnet_features(
    p: Mapping[str, Any],
    x: Any,
    normalised: Callable[[str, str, Any, int], Any],
    relu: Callable[[Any], Any],
    pool: Callable[[Any], Any] | None,
) -> Any:
    """Return what enters the last layer's mean.

    What a block is made of is read off the names of weights. `normalised(convolution, norm, x,
    stride)` are both layers of these names; `pool` is that of a large stem, None of a small one.
    The stride of a block is in its shortcut and in the 3 x 3: the first of two, the second of
    three.
    """
    x = relu(normalised("conv1", "bn1", x, 2 if pool else 1))
    x = pool(x) if pool else x
    for stage in range(1, 5):
        number = 0
        while f"layer{stage}.{number}.conv1.weight" in p:
            block = f"layer{stage}.{number}."
            last = 3 if f"{block}conv3.weight" in p else 2
            stride = 2 if stage > 1 and number == 0 else 1
            h = x
            for place in range(1, last + 1):
                h = normalised(
                    f"{block}conv{place}",
                    f"{block}bn{place}",
                    h,
                    stride if place == last - 1 else 1,
                )
                h = relu(h) if place < last else h
            if f"{block}downsample.0.weight" in p:
                x = normalised(f"{block}downsample.0", f"{block}downsample.1", x, stride)
            x = relu(h + x)
            number += 1
    return x
