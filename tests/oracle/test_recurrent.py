"""Recurrent layers against torch's, of the same weights: outputs, last states and gradients."""

import numpy as np
from oracle import Case, floats, seeded

from actorflow import nn

SIZES = [(t, b, n, h) for b, h in ((1, 5), (3, 2)) for t in (1, 2, 3, 4, 6) for n in (1, 4)]
"""Steps, rows, extent of an entry, extent of the state: few kinds of steps, that compile once."""

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def weight_names(kind, options):
    """Return the names and shapes of a layer's weights, in torch's order, as functions of sizes."""
    gates, proj = GATES[kind.removesuffix("Cell")], options.get("proj_size", 0)
    if kind.endswith("Cell"):
        ends = [("", 0)]
    else:
        sides = ("", "_reverse")[: 1 + options.get("bidirectional", False)]
        layers = range(options.get("num_layers", 1))
        ends = [(f"_l{layer}{side}", layer * len(sides)) for layer in layers for side in sides]
    found = []
    for end, before in ends:
        found.append((f"weight_ih{end}", lambda n, h, s=before: (gates * h, s * (proj or h) or n)))
        found.append((f"weight_hh{end}", lambda n, h: (gates * h, proj or h)))
        if options.get("bias", True):
            found += [(f"bias_{side}{end}", lambda n, h: (gates * h,)) for side in ("ih", "hh")]
        if proj:
            found.append((f"weight_hr{end}", lambda n, h: (proj, h)))
    return found


def case(name, kind, *, has_first=True, cut=False, single=False, scale=0.6, **options):
    """Return a case of a layer: x, its first state, lengths where it is `cut`, its weights."""
    names = weight_names(kind, options)
    is_cell, proj = kind.endswith("Cell"), options.get("proj_size", 0)
    sides = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    widths = [lambda h: proj or h, lambda h: h][: 1 + kind.startswith("LSTM")]
    sets = []
    for t, b, n, h in SIZES:
        x = (b, n) if is_cell else (t, n) if single else (t, b, n)
        if options.get("batch_first"):
            x = (b, t, n)
        rows = () if single else (b,)
        firsts = [(*rows, w(h)) if is_cell else (sides, *rows, w(h)) for w in widths]
        shapes = [x, *(firsts if has_first else ()), *[shape(n, h) for _, shape in names]]
        arrays = [*floats(*shapes, low=-scale, high=scale, key=(t, b))]
        if cut:
            lengths = seeded("lengths", t, b, h).integers(1, t + 1, b)
            lengths[seeded(t, b).integers(b)] = t  # torch's output is as long as the longest
            arrays.append(lengths)
        sets.append(tuple(arrays))
    num_firsts = len(widths) if has_first else 0

    def parted(arguments):
        """Return x, the first state as the layer takes it, lengths, and weights by name."""
        x, *rest = arguments
        lengths = rest.pop() if cut else None
        firsts, given = rest[:num_firsts], rest[num_firsts:]
        first = None if not firsts else tuple(firsts) if len(firsts) > 1 else firsts[0]
        return x, first, lengths, dict(zip([n for n, _ in names], given, strict=True))

    def layer_of(library, x, weights):
        hidden = next(iter(weights.values())).shape[0] // GATES[kind.removesuffix("Cell")]
        return getattr(library, kind)(x.shape[-1], hidden, **options)

    def ours(*arguments):
        x, first, lengths, weights = parted(arguments)
        layer = layer_of(nn, x, weights)
        assert [n for n, _ in layer.named_parameters()] == [*weights]
        for own, tensor in weights.items():
            assert getattr(layer, own).shape == tensor.shape
            setattr(layer, own, tensor)
        return flat(layer(x, first) if is_cell else layer(x, first, lengths=lengths))

    def torchs(torch, *arguments):
        x, first, lengths, weights = parted(arguments)
        layer = layer_of(torch.nn, x, weights).double()
        assert [n for n, _ in layer.named_parameters()] == [*weights]
        if cut:
            rnn = torch.nn.utils.rnn
            x = rnn.pack_padded_sequence(
                x, lengths, batch_first=options.get("batch_first", False), enforce_sorted=False
            )
        made = torch.func.functional_call(layer, weights, (x, first))
        if cut:
            whole = rnn.pad_packed_sequence(made[0], options.get("batch_first", False))
            made = whole[0], made[1]
        return flat(made)

    return Case(name, ours, torchs, sets)


def flat(made):
    """Return the tensors of a tree."""
    return [t for part in made for t in flat(part)] if isinstance(made, tuple) else [made]


BOTH = {"num_layers": 2, "bidirectional": True}

CASES = [
    case("rnn", "RNN", **BOTH, nonlinearity="relu", bias=False),
    case("rnn of lengths", "RNN", bidirectional=True, cut=True, batch_first=True),
    case("gru", "GRU", has_first=False, **BOTH),
    case("gru of lengths", "GRU", num_layers=2, cut=True),
    case("lstm", "LSTM", **BOTH, batch_first=True),
    case("lstm of lengths", "LSTM", bidirectional=True, cut=True),
    case("lstm of one sequence", "LSTM", single=True),
    case("lstm with a projection", "LSTM", num_layers=2, proj_size=1),
    case("rnn cell", "RNNCell"),
    case("gru cell", "GRUCell", bias=False),
    case("lstm cell", "LSTMCell", has_first=False),
]

assert all([len(one.sets) >= 20 for one in CASES])


def test_values_and_gradients_are_torchs(case, dtype, agrees):
    agrees(case, dtype)


def test_a_layer_starts_uniform_in_the_range_of_its_state():
    layer = nn.LSTM(3, 16)
    assert {parameter.init for _, parameter in layer.named_parameters()} == {
        (("kind", "uniform"), ("bound", np.sqrt(1 / 16)))
    }
