"""Attention of several heads, and the layers and stacks that are made of it, from given weights."""

from itertools import product

import numpy as np
from oracle import FEWEST, Case, floats, seeded

import actorflow as af
from actorflow import nn

SIZES = [  # batch, queries, keys, columns, heads
    (b, t, s, e, h)
    for b in (1, 3)
    for t, s in ((1, 2), (4, 3), (3, 5), (6, 6), (2, 7))
    for e, h in ((4, 2), (6, 1))
]
ATTENTION = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
FEED = ("linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias")


def shapes_of(names, e, hidden=5):
    """Return the shapes of parameters by their names."""
    ends = {
        "in_proj_weight": (3 * e, e),
        "in_proj_bias": (3 * e,),
        "out_proj.weight": (e, e),
        "out_proj.bias": (e,),
        "linear1.weight": (hidden, e),
        "linear1.bias": (hidden,),
        "linear2.weight": (e, hidden),
        "linear2.bias": (e,),
        "q_proj_weight": (e, e),
        "k_proj_weight": (e, 3),
        "v_proj_weight": (e, 5),
        "gate_proj.weight": (hidden, e),
        "up_proj.weight": (hidden, e),
        "down_proj.weight": (e, hidden),
        "weight": (e,),
        "bias": (e,),
    }
    found = []
    for name in names:
        end = next(key for key in ends if name == key or name.endswith("." + key))
        found.append(ends[end])
    return found


def with_weights(layer, names, tensors):
    """Return one of our layers with tensors in place of its parameters."""
    for name, tensor in zip(names, tensors, strict=True):
        *path, last = name.split(".")
        owner = layer
        for part in path:
            owner = getattr(owner, part)
        assert getattr(owner, last).shape == tensor.shape
        setattr(owner, last, tensor)
    return layer


def layer_case(name, ours, torchs, names, inputs, masks=None, every=1):
    """Return a case of a layer: its inputs, then its parameters, then its masks.

    `ours` and `torchs` get the sizes and return a layer; `inputs` and `masks` give shapes and
    arrays by the sizes. Keyword arguments are what `masks` calls its arrays. What is made of
    layers with cases of their own takes `every` third size, stacks fewer, and each several times,
    with other numbers: compiling takes its time.
    """
    sets, sizes = [], {}
    chosen = SIZES[::every]
    for turn, size in product(range(-(-FEWEST // len(chosen))), chosen):
        given = floats(*inputs(*size), low=-1, high=1, key=(name, size, turn))
        own = floats(*shapes_of(names, size[3]), low=-1, high=1, key=(name, "own", size, turn))
        extra = masks(*size) if masks else {}
        sets.append((*given, *own, *[x for x in extra.values() if isinstance(x, np.ndarray)]))
        sizes[tuple(x.shape for x in given)] = (size, extra, len(given))

    def split(args):
        count = len(inputs(*SIZES[0]))
        size, extra, _ = sizes[tuple(tuple(x.shape) for x in args[:count])]
        last = len(args) - sum([isinstance(x, np.ndarray) for x in extra.values()])
        arrays = iter(args[last:])
        named = {k: next(arrays) if isinstance(x, np.ndarray) else x for k, x in extra.items()}
        return size, args[:count], args[count:last], named

    def of_ours(*args):
        size, given, own, named = split(args)
        return _flat(with_weights(ours(*size), names, own)(*given, **named))

    def of_torch(t, *args):
        size, given, own, named = split(args)
        layer = torchs(t, *size).double()
        state = dict(zip(names, own, strict=True))
        return _flat(t.func.functional_call(layer, state, given, named))

    return Case(name, of_ours, of_torch, sets)


def _flat(made):
    return [x for x in made if x is not None] if isinstance(made, tuple) else made


def bools(*shape):
    """Return a mask that hides a third, and nowhere all."""
    hidden = seeded("hidden", shape).random(shape) < 0.4
    hidden[..., :2] = False
    return hidden


def three(b, t, s, e, h):
    return (b, t, e), (b, s, e), (b, s, e)


def one(b, t, s, e, h):
    return [(t + 1, b, e)]


def two(b, t, s, e, h):
    return (t + 1, b, e), (s, b, e)


def multihead(**options):
    return (
        lambda b, t, s, e, h: nn.MultiheadAttention(e, h, **options),
        lambda torch, b, t, s, e, h: torch.nn.MultiheadAttention(e, h, **options),
    )


def of_layers(layer, **options):
    """Return an encoder's or decoder's layer of ours, and torch's."""
    return (
        lambda b, t, s, e, h: getattr(nn, layer)(e, h, 5, 0.0, **options),
        lambda torch, b, t, s, e, h: getattr(torch.nn, layer)(e, h, 5, 0.0, **options),
    )


def of_stacks(kind):
    """Return a stack of two layers with a norm."""

    def make(room, e, h, **options):
        layer = getattr(room, f"Transformer{kind}Layer")(e, h, 5, 0.0)
        return getattr(room, f"Transformer{kind}")(layer, 2, room.LayerNorm(e), **options)

    quiet = {"enable_nested_tensor": False} if kind == "Encoder" else {}

    return (
        lambda b, t, s, e, h: make(nn, e, h),
        lambda torch, b, t, s, e, h: make(torch.nn, e, h, **quiet),
    )


def within(attention, norms):
    """Return the parameters of a layer with some attentions and norms."""
    found = [f"{name}.{own}" for name in attention for own in ATTENTION]
    return [*found, *FEED, *[f"norm{i}.{own}" for i in norms for own in ("weight", "bias")]]


ENCODER, DECODER = within(["self_attn"], [1, 2]), within(["self_attn", "multihead_attn"], [1, 2, 3])


def stacked(names):
    own = [f"layers.{i}.{name}" for i in range(2) for name in names]
    return [*own, "norm.weight", "norm.bias"]


def whole(num_layers):
    """Return the parameters of a `Transformer`."""
    rooms = {"encoder": ENCODER, "decoder": DECODER}
    return [
        f"{room}.{name}"
        for room, names in rooms.items()
        for name in (
            *[f"layers.{i}.{name}" for i in range(num_layers) for name in names],
            *("norm.weight", "norm.bias"),
        )
    ]


CASES = [
    layer_case(
        "MultiheadAttention, and its weights", *multihead(batch_first=True), ATTENTION, three
    ),
    layer_case(
        "MultiheadAttention with both masks and weights of heads",
        *multihead(batch_first=True),
        ATTENTION,
        three,
        lambda b, t, s, e, h: {
            "key_padding_mask": bools(b, s),
            "attn_mask": np.broadcast_to(bools(s), (t, s)).copy(),
            "average_attn_weights": False,
        },
    ),
    layer_case(
        "MultiheadAttention without weights, a mask for each head",
        *multihead(batch_first=True),
        ATTENTION,
        three,
        lambda b, t, s, e, h: {
            "attn_mask": seeded("added", t, s).uniform(-2, 2, (b * h, t, s)),
            "need_weights": False,
        },
    ),
    layer_case(
        "MultiheadAttention of keys and values of other widths",
        *multihead(kdim=3, vdim=5),
        ("q_proj_weight", "k_proj_weight", "v_proj_weight", *ATTENTION[1:]),
        lambda b, t, s, e, h: ((t, b, e), (s, b, 3), (s, b, 5)),
    ),
    layer_case(
        "MultiheadAttention without a batch",
        *multihead(),
        ATTENTION,
        lambda b, t, s, e, h: ((t, e), (s, e), (s, e)),
    ),
    layer_case(
        "TransformerEncoderLayer",
        *of_layers("TransformerEncoderLayer"),
        ENCODER,
        one,
        lambda b, t, s, e, h: {"src_key_padding_mask": bools(b, t + 1)},
        every=3,
    ),
    layer_case(
        "TransformerEncoderLayer with norms first",
        *of_layers("TransformerEncoderLayer", norm_first=True, activation="gelu"),
        ENCODER,
        one,
        lambda b, t, s, e, h: {"src_mask": np.triu(np.ones((t + 1, t + 1), bool), 2)},
        every=3,
    ),
    layer_case(
        "TransformerDecoderLayer",
        *of_layers("TransformerDecoderLayer"),
        DECODER,
        two,
        lambda b, t, s, e, h: {"memory_key_padding_mask": bools(b, s)},
        every=3,
    ),
    layer_case("TransformerEncoder", *of_stacks("Encoder"), stacked(ENCODER), one, every=7),
    layer_case("TransformerDecoder", *of_stacks("Decoder"), stacked(DECODER), two, every=7),
    layer_case(
        "Transformer",
        lambda b, t, s, e, h: nn.Transformer(e, h, 1, 1, 5, 0.0),
        lambda torch, b, t, s, e, h: torch.nn.Transformer(e, h, 1, 1, 5, 0.0),
        whole(1),
        lambda b, t, s, e, h: ((s, b, e), (t + 1, b, e)),
        lambda b, t, s, e, h: {"src_key_padding_mask": bools(b, s)},
        every=7,
    ),
    Case(
        "SwiGLU",
        lambda x, *own: with_weights(
            nn.SwiGLU(x.shape[-1], 5),
            ("gate_proj.weight", "up_proj.weight", "down_proj.weight"),
            own,
        )(x),
        lambda t, x, g, u, d: (t.nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T,
        [floats((n, 4), (5, 4), (5, 4), (4, 5), key=n) for n in range(20)],
    ),
    Case(
        "swiglu",
        lambda g, u: af.swiglu(g, u),
        lambda t, g, u: t.nn.functional.silu(g) * u,
        [floats((n, 3), (n, 3), key=n) for n in range(20)],
    ),
]


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)
