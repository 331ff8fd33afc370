"""Data for the examples: digits that are drawn here, and Fashion-MNIST from its files.

Pictures are float32 [N, 1, size, size] in 0..1, labels int32 [N].
"""

import gzip
import struct
from pathlib import Path

import numpy as np

DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where Debian's package dataset-fashion-mnist puts its files."""

FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
           "boot")  # fmt: skip

GLYPHS = {
    "0": ".###. #...# #..## #.#.# ##..# #...# .###.",
    "1": "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    "2": ".###. #...# ....# ...#. ..#.. .#... #####",
    "3": "##### ...#. ..#.. ...#. ....# #...# .###.",
    "4": "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "5": "##### #.... ####. ....# ....# #...# .###.",
    "6": "..##. .#... #.... ####. #...# #...# .###.",
    "7": "##### ....# ...#. ..#.. .#... .#... .#...",
    "8": ".###. #...# #...# .###. #...# #...# .###.",
    "9": ".###. #...# #...# .#### ....# ...#. .##..",
    ".": "..... ..... ..... ..... ..... .##.. .##..",
    "-": "..... ..... ..... ##### ..... ..... .....",
    "+": "..... ..#.. ..#.. ##### ..#.. ..#.. .....",
    "e": "..... ..... .###. #...# ##### #.... .###.",
}
"""Letters of numbers, five pixels wide and seven high."""

_PER_CHUNK = 500


def glyph(letter):
    """Return a letter as an array [7, 5] of zeros and ones."""
    rows = GLYPHS[letter].split()
    return np.array([[mark == "#" for mark in row] for row in rows], np.float32)


def digits(num, *, size=28, seed=0, noise=0.15):
    """Draw `num` digits: {"x": pictures, "y": which digit}, the same for the same seed.

    Each is turned, slanted, scaled, shifted, of its own brightness, and has noise over it.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num, np.int32)
    drawn = [
        _drawn(labels[i : i + _PER_CHUNK], size, rng, shift=0.06, scale=(0.5, 0.75))
        for i in range(0, num, _PER_CHUNK)
    ]
    pictures = np.concatenate(drawn)
    pictures *= rng.uniform(0.6, 1.0, (num, 1, 1)).astype(np.float32)
    pictures += noise * rng.standard_normal(pictures.shape, np.float32)
    return {"x": pictures.clip(0.0, 1.0)[:, None], "y": labels}


def scenes(num, *, size=32, seed=0, noise=0.15):
    """Draw two digits a picture: {"x": pictures, "y": [N, size, size]}, and what each pixel is.

    That is 0 for the ground and 1 + d for a pixel of the digit d.
    """
    rng = np.random.default_rng(seed)
    pictures = np.zeros((num, size, size), np.float32)
    marks = np.zeros((num, size, size), np.int32)
    for side in (-0.25, 0.25):
        labels = rng.integers(0, 10, num, np.int32)
        drawn = _drawn(labels, size, rng, shift=0.06, scale=(0.45, 0.6), centre=(0.0, side))
        pictures = np.maximum(pictures, drawn)
        marks = np.where(drawn > 0.5, 1 + labels[:, None, None], marks)
    pictures += noise * rng.standard_normal(pictures.shape, np.float32)
    return {"x": pictures.clip(0.0, 1.0)[:, None], "y": marks}


def fashion_mnist(path=None, split="train"):
    """Read Fashion-MNIST (Xiao et al., 2017) from a folder of its idx files, packed or not.

    `split` is "train", 60,000 pictures, or "test", 10,000. Without a path they are looked for where
    Debian's package has them. Raises FileNotFoundError that says how to get them.
    """
    folder = Path(DEBIAN if path is None else path)
    begin = {"train": "train", "test": "t10k"}[split]
    pictures = _read_idx(_found(folder, f"{begin}-images-idx3-ubyte"))
    labels = _read_idx(_found(folder, f"{begin}-labels-idx1-ubyte"))
    return {"x": (pictures[:, None] / np.float32(255.0)), "y": labels.astype(np.int32)}


def load(path=None, num=10_000, size=28, noise=0.15):
    """Return (train, test): Fashion-MNIST of a folder, else `num` digits and up to 1000 others.

    Pictures of Fashion-MNIST have 28 pixels a side; for more they get a margin.
    """
    if path is None:
        counts = num, min(1000, num)
        return tuple([digits(n, size=size, seed=i, noise=noise) for i, n in enumerate(counts)])
    margin = (0, 0), (0, 0), *[((size - 28) // 2, (size - 27) // 2)] * 2
    found = fashion_mnist(path, "train"), fashion_mnist(path, "test")
    return tuple([{**part, "x": np.pad(part["x"], margin)} for part in found])


def _drawn(labels, size, rng, *, shift, scale, centre=(0.0, 0.0)):
    """Return the bitmaps of some labels [N, size, size], each through an affine map of its own."""
    num = len(labels)
    bitmaps = np.pad(np.stack([glyph(str(d)) for d in range(10)]), ((0, 0), (1, 1), (1, 1)))

    def draw(low, high):
        return rng.uniform(low, high, (num, 1, 1)).astype(np.float32)

    turn, slant, height = draw(-0.2, 0.2), draw(-0.3, 0.3), draw(*scale)
    width = height * draw(0.6, 0.9)
    down, right = (draw(middle - shift, middle + shift) for middle in centre)

    # From a pixel's place, -0.5..0.5 from the middle, back to a place in the bitmap.
    ticks = ((np.arange(size) + 0.5) / size - 0.5).astype(np.float32)
    y, x = ticks[:, None] - down, ticks[None, :] - right
    cos, sin = np.cos(turn), np.sin(turn)
    v = (cos * y - sin * x) / height
    u = (sin * y + cos * x) / width + slant * v
    rows = (v * 7 + 4).clip(0.0, 7.999)
    columns = (u * 5 + 3).clip(0.0, 5.999)

    top, left = rows.astype(np.intp), columns.astype(np.intp)
    below, beside = rows - top.astype(np.float32), columns - left.astype(np.float32)
    corner = (labels[:, None, None] * bitmaps.shape[1] + top) * bitmaps.shape[2] + left
    flat, line = bitmaps.reshape(-1), bitmaps.shape[2]
    upper = flat[corner] * (1 - beside) + flat[corner + 1] * beside
    lower = flat[corner + line] * (1 - beside) + flat[corner + line + 1] * beside
    return upper * (1 - below) + lower * below


def _found(folder, name):
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"Fashion-MNIST: there is no {name} or {name}.gz in {folder}. Install Debian's package"
        f" dataset-fashion-mnist, which has it in {DEBIAN}, or take the four files from"
        " https://github.com/zalandoresearch/fashion-mnist and name their folder"
    )


def _read_idx(file):
    """Return the array of an idx file: 0, 0, dtype, rank, extents, bytes."""
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    if data[:3] != b"\0\0\x08":
        raise ValueError(f"{file} is no idx file of bytes: it begins with {data[:4]!r}")
    rank = data[3]
    extents = struct.unpack_from(f">{rank}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(extents)
