import numpy as np
import picture
import pytest
from PIL import Image


def read(path):
    return np.asarray(Image.open(path))


def test_a_png_holds_the_pixels_of_its_parts_one_below_the_other(tmp_path):
    rng = np.random.default_rng(0)
    wide, narrow = (rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((3, 7), (2, 4)))
    picture.write_png(tmp_path / "new" / "a.png", wide, narrow)
    seen = read(tmp_path / "new" / "a.png")
    assert seen.shape == (5, 7, 3)
    np.testing.assert_array_equal(seen[:3], wide)
    np.testing.assert_array_equal(seen[3:, :4], narrow)
    assert (seen[3:, 4:] == 255).all()


@pytest.mark.parametrize("shape", [(5, 4, 6), (5, 1, 4, 6), (5, 3, 4, 6)])
def test_a_grid_has_every_picture_in_its_place(shape):
    rng = np.random.default_rng(0)
    pictures = rng.uniform(-1.0, 1.0, shape).astype(np.float32)
    paper = picture.grid(pictures, columns=3, zoom=2, low=-1.0)
    assert paper.shape == (2 * 10 + 2, 3 * 14 + 2, 3)
    last = paper[12:20, 16:28]  # the fifth: second row, second column
    expected = pictures.reshape(5, -1, 4, 6)[4].transpose(1, 2, 0)
    np.testing.assert_allclose(
        last[::2, ::2] / 255 * 2 - 1, np.broadcast_to(expected, (4, 6, 3)), atol=0.005
    )
    np.testing.assert_array_equal(last[::2], last[1::2])
    assert (paper[12:20, 30:] == 255).all()


def test_a_curve_goes_from_its_first_number_to_its_last():
    paper = picture.curves({"down": np.linspace(2.0, 1.0, 50), "same": [2.0] * 50})
    first, second = picture.COLOURS[:2]
    rows, columns = np.nonzero((paper == first).all(-1))
    assert rows[columns == columns.min() + 1].min() < 20
    assert rows[columns == columns.max()].max() > 290
    assert [*np.unique(columns)[1:]] == [*range(columns.min() + 1, columns.max() + 1)]
    assert {*np.nonzero((paper == second).all(-1))[0]} == {10, 11}


@pytest.mark.parametrize(
    "line", [[], [3.0], [float("nan")], [1.0, float("nan"), float("inf"), 2.0], [0.0] * 2000]
)
def test_any_line_can_be_drawn(line):
    assert picture.curves({"line": line}).shape == (320, 640, 3)


def test_pixels_of_one_kind_have_one_colour_and_the_ground_is_black():
    marks = np.array([[[0, 1], [2, 1]]])
    colours = picture.classes(marks, 3)
    assert colours.shape == (1, 3, 2, 2)
    assert not colours[0, :, 0, 0].any()
    np.testing.assert_array_equal(colours[0, :, 0, 1], colours[0, :, 1, 1])
    assert (colours[0, :, 0, 1] != colours[0, :, 1, 0]).any()
