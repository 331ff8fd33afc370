"""No signature is missing: what numpy finds true of an op on parts, the op says, but for a list.

Every choice of words for the operands is tried on two ranks: the op itself runs on parts, and its
results are held against the whole's parts in every layout. What a rank does instead of the op
itself is the business of `test_ways`. How ops that write must lie, their variables say.
"""

import itertools

import numpy as np
import pytest
from rank_graphs import OPS, ROWS, parts_of, types_of, whole_of

from compiler.contract.attrs import Attrs
from compiler.contract.sbp import BROADCAST, PARTIAL, Partial, Split
from compiler.graph.columns import SbpSignature
from compiler.graph.registry import infer_type, input_output_aliases, reference
from compiler.sbp.local_form import candidate_signatures

UNSAID = {
    "argmax": "over one element the answer is always 0",
    "attention": "values split within a head, or shares of them, are nobody's",
    "batch_norm": "shares of weights are nobody's",
    "batch_norm_grad": "shares of dy are summed before its statistics, at the price of dx after it",
    "cast": "shares of integers become integers without a word about overflow",
    "cross_entropy_rows": "of one class the loss is always 0",
    "dropout": "of one element that is kept, or not, for more than one seed",
    "embedding_sgd_update": "passes emit it when all is shared",
    "handed_on": "of the value that it does not hand on",
    "layer_norm": "over one element it is always the bias",
    "max": "of nothing but single elements",
    "maximum": "of shares that are less than the other operand",
    "non_finite": "where all is finite",
    "pad": "of steps that happen to fall on the border of parts",
    "random_bits": "of no elements",
    "slice": "of a place that happens to lie in one part",
    "softmax": "over one element it is always 1",
}
"""Of which ops more is true, of some shapes or numbers, than is worth saying."""

MOST_ELEMENTS = 1500


def layouts(array):
    words = [BROADCAST, *[Split(axis) for axis, n in enumerate(array.shape) if n >= 2]]
    return [*words, PARTIAL] if array.dtype.kind in "if" else words


def is_so(parts, want, word):
    """Whether the results of the ranks are the parts of the whole."""
    if isinstance(word, Partial) and want.dtype.kind not in "if":
        return False
    try:
        made = whole_of(parts, word)
    except (AssertionError, ValueError):
        return False
    return made.shape == want.shape and np.allclose(made, want, 1e-6, 1e-9, equal_nan=True)


def found_true(op, attrs, arrays, words, wanted):
    """Return the layouts of each result that hold for three draws of shares."""
    rng = np.random.default_rng(len(arrays))
    held = None
    for _ in range(3):
        cut = [parts_of(array, word, 2, rng) for array, word in zip(arrays, words, strict=True)]
        made = []
        for rank in range(2):
            try:
                made.append(reference.get(op)(attrs, *[parts[rank] for parts in cut]))
            except Exception:  # whatever it says, it is no layout of this op
                return ()
        pairs = [(want, [np.asarray(own[i]) for own in made]) for i, want in enumerate(wanted)]
        now = [
            {
                word
                for word in (BROADCAST, PARTIAL, *map(Split, range(want.ndim)))
                if is_so(parts, want, word)
            }
            for want, parts in pairs
        ]
        held = now if held is None else [a & b for a, b in zip(held, now, strict=True)]
    return held


def rows_of(name):
    for row in ROWS[name]:
        arrays = [np.asarray(x) for x in row.inputs]
        size = sum(array.size for array in arrays)
        if arrays and size <= MOST_ELEMENTS and not any(0 in a.shape for a in arrays):
            yield row, arrays


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    sorted(name for name in ROWS if name not in UNSAID and not input_output_aliases.get(OPS[name])),
)
def test_whatever_is_true_of_parts_is_a_signature(name):
    op, missing = OPS[name], set()
    for row, arrays in rows_of(name):
        attrs, inputs = Attrs(row.attrs), types_of(arrays)
        outputs = infer_type.get(op)(inputs, attrs)
        wanted = [np.asarray(x) for x in reference.get(op)(attrs, *arrays)]
        if any(0 in want.shape for want in wanted):
            continue
        known = {way.signature for way in candidate_signatures(op, inputs, outputs, attrs, 2)}
        for words in itertools.product(*map(layouts, arrays)):
            if any(word is not BROADCAST for word in words):
                held = found_true(op, attrs, arrays, words, wanted)
                missing |= {SbpSignature(words, made) for made in itertools.product(*held or ((),))}
        missing = {s for s in missing if s.outputs and s not in known}
    assert not missing, sorted(map(str, missing))
