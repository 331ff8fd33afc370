"""Layers that cut, join and look up, and functions that they are made of."""

from oracle import SHAPES, Case, floats

import actorflow as af
from actorflow import nn


def padded(room, rank, x):
    """Return what the paddings of our layers, or of torch's, make of x."""
    both = tuple(range(1, 2 * rank + 1))

    def layer(kind, *args):
        return getattr(room, f"{kind}Pad{rank}d")(*args)(x)

    return [
        layer("Reflection", tuple([n % 3 for n in both])),
        layer("Replication", both),
        layer("Circular", tuple([n % 3 for n in both])),
        layer("Circular", 1),
        layer("Constant", (-1, *both[1:]), 2.5),
        layer("Zero", 2),
    ]


def padding_case(rank):
    shape = (2, 3, *(5, 4, 3)[:rank])
    return Case(
        f"paddings of {rank} axes",
        lambda x: padded(nn, rank, x),
        lambda t, x: padded(t.nn, rank, x),
        [floats(shape, key=n) for n in range(20)],
    )


UNITS = ("_u", "_v")
"""Tensors of parametrizations that are unit vectors."""


def parametrized_case(kind, layer, weights):
    """Return a case of a layer from its parametrization's tensors, by their torch names."""
    sizes = (4, 3, 2) if "Conv" in layer else (4, 3)

    def of_ours(x, *tensors):
        made = getattr(nn, kind)(getattr(nn, layer)(*sizes, bias=False))
        for name, tensor in zip(weights, tensors, strict=True):
            *path, last = name.split(".")
            owner = made.parametrizations["weight"]
            for part in path:
                owner = vars(owner)[part]
            assert getattr(owner, last).shape == tensor.shape
            setattr(owner, last, af.normalize(tensor, dim=0) if last in UNITS else tensor)
        return made(x)

    def of_torch(t, x, *tensors):
        wrap = getattr(t.nn.utils.parametrizations, kind)
        made = wrap(getattr(t.nn, layer)(*sizes, bias=False).double()).eval()
        values = {
            f"parametrizations.weight.{name}": t.nn.functional.normalize(tensor, dim=0)
            if name.split(".")[-1] in UNITS
            else tensor
            for name, tensor in zip(weights, tensors, strict=True)
        }
        return t.func.functional_call(made, values, (x,))

    x = (2, 4, 3, 3) if "2d" in layer else (2, 4, 5) if "Conv" in layer else (2, 4)
    sets = [floats(x, *weights.values(), low=0.2, high=2, key=n) for n in range(20)]
    return Case(f"{kind} of {layer}", of_ours, of_torch, sets)


FULL = [floats((2, n, 3), key=n) for n in range(1, 21)]

CASES = [
    Case("flatten", af.flatten, lambda t, x: t.flatten(x), [floats(s, key=s) for s in SHAPES]),
    Case("flatten axes", lambda x: x.flatten(0, 1), lambda t, x: x.flatten(0, 1), FULL),
    Case(
        "unflatten",
        lambda x: x.unflatten(-1, (3, -1, 1)),
        lambda t, x: x.unflatten(-1, (3, -1, 1)),
        FULL,
    ),
    *[padding_case(rank) for rank in (1, 2, 3)],
    Case(
        "CosineSimilarity and PairwiseDistance",
        lambda a, b: [nn.CosineSimilarity(0)(a, b), nn.PairwiseDistance(3.0, keepdim=True)(a, b)],
        lambda t, a, b: [
            t.nn.CosineSimilarity(0)(a, b),
            t.nn.PairwiseDistance(3.0, keepdim=True)(a, b),
        ],
        [floats((3, 4), (3, 4), key=n) for n in range(20)],
    ),
    parametrized_case("weight_norm", "Linear", {"original0": (3, 1), "original1": (3, 4)}),
    parametrized_case(
        "weight_norm", "ConvTranspose1d", {"original0": (4, 1, 1), "original1": (4, 3, 2)}
    ),
    parametrized_case(
        "spectral_norm", "Conv2d", {"original": (3, 4, 2, 2), "0._u": (3,), "0._v": (16,)}
    ),
    parametrized_case(
        "spectral_norm", "ConvTranspose1d", {"original": (4, 3, 2), "0._u": (3,), "0._v": (8,)}
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
