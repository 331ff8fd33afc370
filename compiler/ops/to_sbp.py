"""The op by which a job says how a value lies on its ranks.

It computes nothing. Projection brings the value into the layout, and leaves the op out
(`compiler.passes.distribute`); what flows back through it may lie otherwise.
"""

from __future__ import annotations

from compiler.attrs import Attrs
from compiler.graph import GraphBuilder
from compiler.ops.rule import array_of, gradient_of, streams
from compiler.ops.signature import Types, typed
from compiler.registry import OpTypeError, define, inside, is_exact, view
from compiler.sbp.project import LocalCall, project
from compiler.sbp.signatures import SbpSignature, sbp_signatures
from compiler.sbp.words import PARTIAL, PARTIAL_MAX, PARTIAL_MIN, Sbp, Split, word_of
from compiler.types import ValueId

TO_SBP = define("to_sbp")
"""x -> x. Attrs: sbp, pairs of an axis of the mesh and a word, such as ("model", "S(1)")."""


def _check(inputs: Types, attrs: Attrs) -> None:
    pairs = attrs.get("sbp", ())
    for pair in pairs if isinstance(pairs, tuple) else (pairs,):
        if not isinstance(pair, tuple) or [type(part) for part in pair] != [str, str]:
            raise OpTypeError(f"needs pairs of an axis of the mesh and a word, got {pair!r}")
        try:
            word = word_of(str(pair[1]))
        except ValueError as error:
            raise OpTypeError(f"is told that {error}") from None
        if isinstance(word, Split) and word.axis >= inputs[0].rank:
            raise OpTypeError(f"cannot split axis {word.axis} of {inputs[0]}")


typed(TO_SBP, "x -> x", _check)
is_exact.register(TO_SBP, True)
streams(TO_SBP)
array_of(TO_SBP)(lambda attrs, x: x.copy())
gradient_of(TO_SBP)(lambda b, node, dy: (dy,))
view.of(TO_SBP)(lambda input_type, layout, output_type, attrs: layout)
inside.of(TO_SBP)(lambda output_type, layout, input_types, attrs: (layout,))


@sbp_signatures.of(TO_SBP)
def _signatures(inputs: Types, outputs: Types, attrs: Attrs, parts: int) -> list[SbpSignature]:
    words: list[Sbp] = [PARTIAL, PARTIAL_MAX, PARTIAL_MIN]
    words += [Split(axis) for axis in range(inputs[0].rank)]
    return [SbpSignature((word,), (word,)) for word in words]


@project.of(TO_SBP)
def _what_came(b: GraphBuilder, call: LocalCall) -> tuple[ValueId, ...]:
    return call.inputs
