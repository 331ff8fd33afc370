"""The rows' models, said once for the engines that bring their own layers.

`families(on)` takes the module of an engine, whose functions are the layers: `linear`, `norm`,
`attend`, `convolved`, `batch_norm` and so on, in the layout that the engine is fastest in. What a
layer reads it finds in `p` by names, which are those of our modules and of torch's. A family
returns the loss of a batch, of an inference the scores. What engines write differently, the LSTM
and losses in chunks, is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from rows.row import Row

Parameters = Mapping[str, Any]


def families(on: ModuleType) -> dict[str, Callable[[Row, Any, Any], Any]]:
    """Return the function of each family of rows, by its name."""
    return {family.__name__: partial(family, on) for family in _FAMILIES}


def chain(on, p: Parameters, prefix: str, x):
    """Linear layers with relu between them, in the order of their numbers."""
    names = [f"{prefix}.{i}" for i in range(len(p)) if f"{prefix}.{i}.weight" in p]
    for name in names[:-1]:
        x = on.relu(on.linear(p, name, x))
    return on.linear(p, names[-1], x)


def feed_forward(on, p: Parameters, prefix: str, x):
    return on.linear(p, f"{prefix}mlp.down", on.tanh_gelu(on.linear(p, f"{prefix}mlp.up", x)))


def block(on, p: Parameters, prefix: str, x, heads: int):
    x = x + on.attend(p, prefix, on.norm(p, f"{prefix}norm1", x), heads, is_causal=True)
    return x + feed_forward(on, p, prefix, on.norm(p, f"{prefix}norm2", x))


def bert_block(on, p: Parameters, prefix: str, x, heads: int):
    x = on.norm(p, f"{prefix}norm1", x + on.attend(p, prefix, x, heads, is_causal=False))
    return on.norm(p, f"{prefix}norm2", x + feed_forward(on, p, prefix, x))


def hidden(on, row: Row, p: Parameters, x):
    """What enters the head of a GPT."""
    h = on.look_up(p["emb.weight"], x) + p["pos.weight"]
    for i in range(row.sizes["layers"]):
        h = block(on, p, f"blocks.{i}.", h, row.sizes["heads"])
    return on.norm(p, "norm", h)


def _scored(on, row: Row, scores, batch):
    return on.cross_entropy(scores, batch["y"]) if row.is_training else scores


def tiny(on, row: Row, p: Parameters, batch):
    x = batch["x"]
    for i in range(row.sizes["layers"]):
        h = x @ p[f"layers.{i}.w"] + p[f"layers.{i}.b"]
        x = (on.relu(h) if i % 2 else on.tanh(h)) * p[f"layers.{i}.g"]
    return on.mean_squared(x, batch["y"])


def mlp(on, row: Row, p: Parameters, batch):
    return _scored(on, row, chain(on, p, "layers", batch["x"]), batch)


def gpt(on, row: Row, p: Parameters, batch):
    return _scored(on, row, on.linear(p, "head", hidden(on, row, p, batch["x"])), batch)


def gpt2(on, row: Row, p: Parameters, batch):
    scores = on.scores_of(hidden(on, row, p, batch["x"]), p["emb.weight"])
    return on.cross_entropy(scores, batch["y"])


def bert(on, row: Row, p: Parameters, batch):
    h = on.look_up(p["emb.weight"], batch["x"]) + p["pos.weight"]
    h = on.norm(p, "first", h + on.look_up(p["segment.weight"], batch["segments"]))
    for i in range(row.sizes["layers"]):
        h = bert_block(on, p, f"blocks.{i}.", h, row.sizes["heads"])
    masked = on.linear(p, "dense", on.picked(on.reshape(h, (-1, h.shape[-1])), batch["places"]))
    masked = on.norm(p, "last", on.tanh_gelu(masked))
    return on.cross_entropy(on.scores_of(masked, p["emb.weight"], p["bias"]), batch["y"])


def gpt2_block(on, row: Row, p: Parameters, batch):
    return on.mean_squared(block(on, p, "block.", on.read(p["x"]), row.sizes["heads"]), batch["y"])


def wide_deep(on, row: Row, p: Parameters, batch):
    x = on.concat([*on.found(row, p, batch), batch["dense"]], 1)
    scores = chain(on, p, "layers", x) + on.linear(p, "wide", batch["dense"])
    return on.cross_entropy(scores, batch["y"])


def dlrm(on, row: Row, p: Parameters, batch):
    """All pairs of features are multiplied; those below the diagonal go on."""
    x = on.relu(chain(on, p, "bot_l", batch["dense"]))
    features = on.stack([x, *on.found(row, p, batch)], 1)
    products = on.einsum("bik,bjk->bij", features, features)
    count = features.shape[1]
    below = [i * count + j for i in range(count) for j in range(i)]
    pairs = on.columns(on.reshape(products, (-1, count * count)), below)
    logits = chain(on, p, "top_l", on.concat([x, pairs], 1))
    return on.binary_cross_entropy(on.reshape(logits, (-1,)), batch["y"])


def lenet(on, row: Row, p: Parameters, batch):
    x = on.max_pool(on.relu(on.convolved(p, "conv1", batch["x"])), 2, 2)
    x = on.max_pool(on.relu(on.convolved(p, "conv2", x, padding=0)), 2, 2)
    x = on.relu(on.linear(p, "fc1", on.flat(x)))
    scores = on.linear(p, "fc3", on.relu(on.linear(p, "fc2", x)))
    return on.cross_entropy(scores, batch["y"])


def resnet(on, row: Row, p: Parameters, batch):
    def normalised(conv: str, norm: str, x, stride: int):
        return on.batch_norm(row, p, norm, on.convolved(p, conv, x, stride))

    pool = partial(on.max_pool, extent=3, stride=2, padding=1) if row.sizes["stem"] == 7 else None
    x = on.pixel_mean(resnet_features(p, batch["x"], normalised, on.relu, pool))
    return _scored(on, row, on.linear(p, "fc", x), batch)


def unet(on, row: Row, p: Parameters, batch):
    def doubled(name: str, x):
        for conv, norm in (("0", "1"), ("3", "4")):
            x = on.convolved(p, f"{name}.{conv}", x)
            x = on.relu(on.batch_norm(row, p, f"{name}.{norm}", x))
        return x

    h, twins = doubled("inc", batch["x"]), []
    for level in range(row.sizes["depth"]):
        twins.append(h)
        h = doubled(f"down.{level}", on.max_pool(h, 2, 2))
    for level in range(row.sizes["depth"]):
        h = on.concat([twins.pop(), on.upsampled(p, f"up.{level}", h)], on.CHANNELS)
        h = doubled(f"join.{level}", h)
    return _scored(on, row, on.convolved(p, "outc", h), batch)


def vit(on, row: Row, p: Parameters, batch):
    sizes = row.sizes
    patches = on.convolved(p, "patch_embed.proj", batch["x"], sizes["patch"], padding=0)
    tokens = on.tokens(patches)
    first = on.broadcast_to(p["cls_token"], (tokens.shape[0], 1, tokens.shape[-1]))
    h = on.concat([first, tokens], 1) + p["pos_embed"]
    for i in range(sizes["layers"]):
        name = f"blocks.{i}."
        x = on.norm(p, f"{name}norm1", h, 1e-6)
        h = h + on.attend(p, name, x, sizes["heads"], is_causal=False)
        x = on.gelu(on.linear(p, f"{name}mlp.fc1", on.norm(p, f"{name}norm2", h, 1e-6)))
        h = h + on.linear(p, f"{name}mlp.fc2", x)
    return _scored(on, row, on.linear(p, "head", on.norm(p, "norm", h, 1e-6)[:, 0]), batch)


_FAMILIES = (
    *(tiny, mlp, gpt, gpt2, bert, gpt2_block),
    *(wide_deep, dlrm, lenet, resnet, unet, vit),
)


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
