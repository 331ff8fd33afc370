"""ResNet v1.5 (He et al., 2015) under gradient descent, and one picture through the deeper one.

ResNet-18 has 32 pictures of 32 x 32 and the stem for them, a 3 x 3 convolution alone; ResNet-50 has
8 of 224 x 224, on a GPU 64. Names are torchvision's, with the running statistics, which training
changes in every engine. An engine reads off names and shapes what a block is made of.

The rates are small: with larger ones, batch norm lets the last bits of float32 grow to a ten
thousandth of the loss within ten steps, whatever the engine. Of ResNet-50 at its first weights and
with 8 pictures, elements of float32's gradients are up to a tenth of the largest away from
float64's, in torch and here alike.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rows.row import BOTH, Arrays, Optimizer, Row, normal, pictures

WIDTH = 64
STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def convolution(
    rng: np.random.Generator, name: str, norm: str, shape: tuple[int, int, int], scale: float = 1.0
) -> Arrays:
    """Return a convolution of `shape` (results, channels, kernel) and the norm that follows it."""
    results, channels, kernel = shape
    std = (2.0 / (results * kernel**2)) ** 0.5
    return {
        f"{name}.weight": normal(rng, results, channels, kernel, kernel, std=std),
        f"{norm}.weight": np.full(results, scale, np.float32),
        f"{norm}.bias": np.zeros(results, np.float32),
        f"{norm}.running_mean": np.zeros(results, np.float32),
        f"{norm}.running_var": np.ones(results, np.float32),
        f"{norm}.num_batches_tracked": np.zeros((), np.int64),
    }


def weights(depth: int, stem: int, classes: int) -> Arrays:
    """Return weights and running statistics; `stem` is the extent of the first kernel."""
    rng = np.random.default_rng(1)
    arrays = convolution(rng, "conv1", "bn1", (WIDTH, 3, stem))
    channels = WIDTH
    for stage, blocks in enumerate(STAGES[depth]):
        for number in range(blocks):
            block, planes = f"layer{stage + 1}.{number}.", WIDTH << stage
            kernels = (3, 3) if depth == 18 else (1, 3, 1)
            results = planes if depth == 18 else 4 * planes
            widths = [channels, *[planes] * (len(kernels) - 1), results]
            for place, kernel in enumerate(kernels):
                # Small beside the shortcut, or numbers double with every block at inference.
                scale = 0.5 if place == len(kernels) - 1 else 1.0
                names = f"{block}conv{place + 1}", f"{block}bn{place + 1}"
                shape = widths[place + 1], widths[place], kernel
                arrays |= convolution(rng, *names, shape, scale)
            if number == 0 and (stage or channels != results):
                names = f"{block}downsample.0", f"{block}downsample.1"
                arrays |= convolution(rng, *names, (results, channels, 1))
            channels = results
    arrays["fc.weight"] = normal(rng, classes, channels, std=channels**-0.5)
    arrays["fc.bias"] = np.zeros(classes, np.float32)
    return arrays


def resnet_row(
    name: str,
    depth: int,
    batch: int,
    size: int,
    classes: int,
    optimizer: Optimizer,
    precisions: tuple[str, ...] = BOTH,
) -> Row:
    """Return a row of a depth, 18 or 50, on pictures of some size."""
    stem = 7 if size > 100 else 3
    return Row(
        name,
        "resnet",
        {"depth": depth, "classes": classes, "stem": stem},
        optimizer,
        batch,
        "pictures",
        partial(weights, depth, stem, classes),
        partial(pictures, batch, 3, size, classes),
        precisions,
    )


SGD, SMALL_STEPS = Optimizer("sgd", 1e-3), Optimizer("sgd", 1e-6)
ROWS = (
    resnet_row("resnet-18", 18, 32, 32, 10, SGD),
    resnet_row("resnet-50", 50, 8, 224, 1000, SMALL_STEPS),
)
INFERENCE = (resnet_row("resnet-50-inference", 50, 1, 224, 1000, Optimizer("none")),)
GPU_ROWS = (resnet_row("resnet-50-b64", 50, 64, 224, 1000, SMALL_STEPS, ("bf16",)),)
