"""Curves and grids of pictures as PNG, with numpy and the standard library alone."""

import struct
import zlib
from pathlib import Path

import numpy as np
from datasets import glyph

COLOURS = ((31, 119, 180), (214, 90, 20), (44, 140, 60), (150, 60, 160), (110, 110, 110))
_INK, _LINE, _PAPER = (60, 66, 74), (210, 214, 220), (255, 255, 255)
_MARGIN, _LETTER = 10, 6
_LEFT = _MARGIN + 10 * _LETTER


def write_png(path, *parts):
    """Write pictures [H, W, 3] of bytes one below the other into a file; make its folder."""
    width = max(part.shape[1] for part in parts)
    parts = [
        np.pad(p, ((0, 0), (0, width - p.shape[1]), (0, 0)), constant_values=255) for p in parts
    ]
    pixels = np.ascontiguousarray(np.concatenate(parts), np.uint8)
    height = len(pixels)
    # Each line of a PNG begins with the number of its filter; 0 is none.
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines.tobytes()))
        + _chunk(b"IEND", b"")
    )


def grid(pictures, *, columns=8, zoom=3, low=0.0, high=1.0):
    """Return pictures [N, 1 or 3, H, W], or [N, H, W], of numbers in low..high side by side."""
    pictures = np.asarray(pictures, np.float32)
    if pictures.ndim == 3:
        pictures = pictures[:, None]
    pictures = ((pictures - low) / (high - low)).clip(0.0, 1.0) * 255
    num, _, height, width = pictures.shape
    rows = -(-num // columns)
    height, width = height * zoom + 2, width * zoom + 2
    paper = np.full((rows * height + 2, columns * width + 2, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * height + 2, i % columns * width + 2
        large = picture.transpose(1, 2, 0).repeat(zoom, 0).repeat(zoom, 1)
        paper[top : top + height - 2, left : left + width - 2] = large.round()
    return paper


def classes(marks, num_classes):
    """Return what pixels are, [N, H, W], as pictures [N, 3, H, W] of colours; 0 is black."""
    angles = 2 * np.pi * np.arange(num_classes)[:, None] / max(1, num_classes - 1)
    palette = 0.55 + 0.45 * np.cos(angles + np.array([0.0, 2.1, 4.2]))
    palette[0] = 0.0
    return palette[np.asarray(marks)].transpose(0, 3, 1, 2)


def curves(lines, *, width=640, height=320):
    """Return {name: numbers by step} as lines over the steps, one colour each, in order.

    The least and the largest of all are written at the left, the number of steps below.
    """
    paper = np.full((height, width, 3), 255, np.uint8)
    top, bottom, right = _MARGIN, height - _MARGIN - 10, width - _MARGIN
    known = [np.asarray(line, np.float64) for line in lines.values()]
    finite = np.concatenate([line[np.isfinite(line)] for line in known] or [np.zeros(1)])
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    spread = high - low or 1.0
    for part in range(5):
        paper[round(bottom - part * (bottom - top) / 4), _LEFT:right] = _LINE
    paper[top:bottom, _LEFT] = _INK
    paper[bottom, _LEFT:right] = _INK
    most = max([len(line) for line in known] or [1])
    for colour, line in zip(_cycled(len(known)), known, strict=True):
        steps = np.flatnonzero(np.isfinite(line))
        if not steps.size:
            continue
        xs = _LEFT + steps * (right - 1 - _LEFT) / max(1, most - 1)
        ys = bottom - (line[steps] - low) * (bottom - top) / spread
        _draw_line(paper, xs, ys, colour)
    _write(paper, top, _MARGIN, f"{high:.4g}")
    _write(paper, bottom - 7, _MARGIN, f"{low:.4g}")
    steps = str(most)
    _write(paper, bottom + 6, right - _LETTER * len(steps), steps)
    return paper


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _cycled(count):
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _draw_line(paper, xs, ys, colour):
    """Colour the pixels of a line, a column at a time: all from one height to the next."""
    columns = np.arange(round(xs[0]), round(xs[-1]) + 1)
    heights = np.interp(columns, xs, ys).round().astype(int)
    before = [heights[0], *heights[:-1]]
    for column, begin, end in zip(columns, before, heights, strict=True):
        first, last = min(begin, end), max(begin, end)
        paper[first : last + 2, column] = colour


def _write(paper, top, left, text):
    for place, letter in enumerate(text):
        box = paper[top : top + 7, left + place * _LETTER :][:, :5]
        box[glyph(letter).astype(bool)] = _INK
