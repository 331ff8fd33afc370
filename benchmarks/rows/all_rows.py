"""All rows, in the order of the report. A new row is one line here and its file.

`GPU_ROWS` are too large for a host; they are measured on a GPU alone.
"""

from __future__ import annotations

from rows import (
    bert,
    dlrm,
    gpt,
    gpt2,
    gpt2_block,
    lenet,
    lstm,
    mlp,
    resnet,
    tiny,
    unet,
    vit,
    wide_deep,
)
from rows.row import Row

_GPT = {row.name: row for row in gpt.ROWS}

ALL_ROWS: tuple[Row, ...] = (
    *tiny.ROWS,
    *mlp.ROWS,
    _GPT["char-gpt"],
    _GPT["gpt"],
    _GPT["gpt-vocab"],
    *bert.HOST_ROWS,
    *gpt2_block.ROWS,
    *wide_deep.ROWS,
    *dlrm.ROWS,
    *lstm.ROWS,
    *lenet.ROWS,
    *resnet.ROWS,
    *unet.ROWS,
    *vit.ROWS,
    *mlp.INFERENCE,
    _GPT["inference"],
    *resnet.INFERENCE,
)

GPU_ROWS: tuple[Row, ...] = (*gpt2.ROWS, *bert.GPU_ROWS, *resnet.GPU_ROWS)


def find_row(name: str) -> Row:
    """Return the row of a name. Raises LookupError."""
    return next(row for row in (*ALL_ROWS, *GPU_ROWS) if row.name == name)
