"""Cross entropy before its mean: what a group computes of it, a reduction over rows behind.

Only the pass `fuse` emits this op, and puts it into a group at once.
"""

from __future__ import annotations

import numpy as np

from compiler.attrs import Attrs
from compiler.ops.loss import CROSS_ENTROPY, check_indices
from compiler.ops.signature import Array, Types
from compiler.registry import cost, define, infer_type, reference
from compiler.types import TensorType

CROSS_ENTROPY_ROWS = define("cross_entropy_rows")
"""logits [N, C], labels [N] -> losses [N], lse [N]: `cross_entropy` without the mean."""


@infer_type.of(CROSS_ENTROPY_ROWS)
def _rows_type(inputs: Types, attrs: Attrs) -> Types:
    _, lse = infer_type.get(CROSS_ENTROPY)(inputs, attrs)
    return TensorType(lse.dtype, lse.shape), lse


@reference.of(CROSS_ENTROPY_ROWS)
def _rows_reference(attrs: Attrs, *inputs: Array) -> tuple[Array, ...]:
    logits, labels = inputs
    check_indices(labels, logits.shape[1], "cross_entropy", "label", "classes")
    _, lse = reference.get(CROSS_ENTROPY)(attrs, logits, labels)
    return lse - logits[np.arange(len(labels)), labels], lse


cost.register(CROSS_ENTROPY_ROWS, cost.get(CROSS_ENTROPY))
