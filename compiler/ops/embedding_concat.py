"""Rows of several tables, and other tensors, joined along the last axis in one pass.

Wide models pick a row of each of dozens of narrow tables and join them: on their own the picked
rows are written, read and written again. Only the pass `fuse_lookups` emits this op, behind
autodiff; it has no gradient.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.embedding import EMBEDDING
from compiler.ops.signature import Array, Types
from compiler.ops.slicing import CONCAT
from compiler.registry import Cost, OpTypeError, cost, define, infer_type, reference

EMBEDDING_CONCAT = define("embedding_concat")
"""part 0, part 1, ... -> the parts one after another along the last axis.

Attrs: picked, an int per part: 1 where the part is two inputs, weight [V, D] and ids, and stands
for `embedding`(weight, ids); 0 where it is one tensor. An id outside 0..V-1 raises IndexError at
run time.
"""


@infer_type.of(EMBEDDING_CONCAT)
def _concat_type(inputs: Types, attrs: Attrs) -> Types:
    picked = attrs.ints("picked")
    if len(inputs) != len(picked) + sum(picked):
        raise OpTypeError(
            f"needs {len(picked) + sum(picked)} inputs for picked={picked}, got {len(inputs)}"
        )
    left = iter(inputs)
    parts = [
        infer_type.get(EMBEDDING)((next(left), next(left)), attrs)[0] if is_picked else next(left)
        for is_picked in picked
    ]
    return infer_type.get(CONCAT)(tuple(parts), Attrs({"axis": max(parts[0].rank - 1, 0)}))


@reference.of(EMBEDDING_CONCAT)
def _concat_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    left = iter(inputs)
    parts = [
        reference.get(EMBEDDING)(attrs, next(left), next(left))[0] if is_picked else next(left)
        for is_picked in attrs.ints("picked")
    ]
    return (np.concatenate(parts, -1),)


@cost.of(EMBEDDING_CONCAT)
def _concat_cost(inputs: Types, outputs: Types, attrs: Attrs) -> Cost:
    """Only the rows that are picked move."""
    return Cost(0.0, 2.0 * outputs[0].size_bytes)
