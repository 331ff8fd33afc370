import sys

import numpy as np
import pytest
from error_texts import raises

from actorflow.cli.memory_map import COLOURS, BoxKind, MissingPillow, draw, map_memory, write_png

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: extra cli")


def rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def test_the_picture_is_a_png_with_the_colours_of_what_is_in_the_plan(training_plan, tmp_path):
    write_png(training_plan, tmp_path / "map.png")
    image = Image.open(tmp_path / "map.png")
    assert (image.format, image.size) == ("PNG", (2000, 1250))
    seen = {
        tuple(c) for c in np.unique(np.asarray(image)[140:990, 110:1550].reshape(-1, 3), axis=0)
    }
    for kind in (
        BoxKind.PARAMETER,
        BoxKind.OPTIMIZER,
        BoxKind.STAGING,
        BoxKind.ACTIVATION,
        BoxKind.BACKWARD,
    ):
        assert rgb(COLOURS[kind]) in seen
    assert rgb(COLOURS[BoxKind.RECOMPUTED]) not in seen


def test_a_box_is_drawn_at_its_offset_and_time(training_plan):
    shown = map_memory(training_plan)
    pixels = np.asarray(draw(shown))
    box = next(b for b in shown.boxes if b.kind is BoxKind.STAGING)
    x = 110 + 1440 * 0.8
    y = 140 + 850 * (1 - (box.offset_bytes + 0.5 * box.size_bytes) / shown.account.peak_bytes)
    assert tuple(pixels[int(y), int(x)]) == rgb(COLOURS[BoxKind.STAGING])


def test_without_pillow_the_error_names_the_extra(training_plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with raises(MissingPillow):
        draw(map_memory(training_plan))
