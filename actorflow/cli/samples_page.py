"""The rows that `af.callbacks.ReportSamples` keeps, as the part of a page: images and texts.

What the file of a run says is text. Its images are pixels, of which the PNG is made here, so that
no browser decodes what somebody else has written.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from actorflow.callbacks.samples import SampleSet, SampleValue, pixels_of
from actorflow.cli.page import MOST_OF_LINE, text


def samples_part(sets: Sequence[SampleSet]) -> str:
    """Return the rows of a run, the newest first, of which the others are folded."""
    parts = []
    for place, one in enumerate(reversed(sets)):
        rows = "".join([_row(number, row) for number, row in enumerate(one.rows)])
        is_open = " open" * (not place)
        title = f"Samples after step {one.step:,}"
        parts.append(
            f"<details{is_open}><summary>{title}</summary>"
            f'<div class="samples">{rows}</div></details>'
        )
    return "".join(parts)


def _row(number: int, row: Sequence[SampleValue]) -> str:
    parts = [f"<figure><figcaption>row {number}</figcaption>"]
    for value in row:
        image, about = pixels_of(value) if value.pixels else None, text(value.name)
        if image is not None:
            encoded = base64.b64encode(png_of(image)).decode()
            alt = f"{about} of row {number}"
            parts.append(f'<img alt="{alt}" src="data:image/png;base64,{encoded}"/>')
        parts.append(f'<p><span class="soft">{about}</span> {text(value.text, MOST_OF_LINE)}</p>')
    return "".join([*parts, "</figure>"])


def png_of(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return uint8 [height, width, 1 or 3] as PNG (W3C, 2003): rows without filters."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in chunks
        ]
    )
