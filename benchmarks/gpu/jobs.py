"""The jobs of the check: what is measured, and small ones that are compared with the host."""

from __future__ import annotations

from dataclasses import replace

from rows.all_rows import find_row
from rows.bert import SIZES as BERT
from rows.bert import bert_row
from rows.gpt2 import SIZES as GPT2
from rows.gpt2 import gpt2_row
from rows.row import Arrays, Row

MEASURED = ("gpt2-b64", "gpt2-b1", "resnet-50-b64", "bert-base", "gpt2-b8", "tiny", "lstm")
"""Rows that are timed, the most important first: time may be up before the last."""

TAKEN_APART = ("gpt2-b64", "gpt2-b1", "bert-base", "resnet-50-b64", "lstm")
"""Rows whose launches are timed one by one."""

SMALL = {"layers": 2, "width": 64, "heads": 2, "seq": 42, "batch": 3, "vocab": 384}
"""Sizes at which the large models are compared with the host."""

TINY = GPT2 | {"layers": 1, "width": 32, "heads": 2, "seq": 14, "batch": 2, "vocab": 64}
"""Sizes at which the check itself is tried."""


def proven_rows(*, is_tiny: bool) -> tuple[tuple[Row, str], ...]:
    """Return rows and precisions whose steps are compared with the host's."""
    if is_tiny:
        return (_short(find_row("tiny"), 3), "fp32"), (gpt2_row("tiny-gpt2", TINY), "bf16")
    return (
        (find_row("tiny"), "fp32"),
        (gpt2_row("small-gpt2", GPT2 | SMALL), "fp32"),
        (gpt2_row("small-gpt2", GPT2 | SMALL), "bf16"),
        (bert_row("small-bert", BERT | SMALL), "bf16"),
        (find_row("mlp"), "fp32"),
        (find_row("mlp"), "bf16"),
        *[(find_row(name), "fp32") for name in ("char-gpt", "wide-deep")],
    )


def measured_rows(*, is_tiny: bool) -> tuple[tuple[Row, str], ...]:
    """Return rows and precisions that are timed."""
    if is_tiny:
        return proven_rows(is_tiny=True)
    rows = [find_row(name) for name in MEASURED]
    return tuple([(row, row.precisions[-1]) for row in rows])


def _short(row: Row, layers: int) -> Row:
    """Return a row of fewer layers."""
    gone = tuple([f"layers.{i}." for i in range(layers, row.sizes["layers"])])

    def weights() -> Arrays:
        return {n: a for n, a in row.weights().items() if not n.startswith(gone)}

    return replace(row, sizes=dict(row.sizes) | {"layers": layers}, weights=weights)
