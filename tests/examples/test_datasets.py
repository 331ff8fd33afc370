import gzip
import struct

import datasets
import numpy as np
import pytest
from error_texts import raises


def test_digits_are_the_same_for_a_seed_and_others_for_another():
    first, again, other = (datasets.digits(50, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first["x"], again["x"])
    np.testing.assert_array_equal(first["y"], again["y"])
    assert (first["x"] != other["x"]).any()
    assert first["x"].shape == (50, 1, 28, 28)
    assert first["x"].dtype == np.float32
    assert first["y"].dtype == np.int32
    assert first["x"].min() == 0.0
    assert first["x"].max() <= 1.0
    assert {*first["y"].tolist()} == {*range(10)}


@pytest.mark.parametrize("size", [8, 28])
def test_a_digit_without_noise_is_nearest_to_the_mean_of_its_own_kind(size):
    drawn = datasets.digits(2000, size=size, noise=0.0)
    flat = drawn["x"].reshape(2000, -1)
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    means = np.stack([flat[drawn["y"] == d].mean(0) for d in range(10)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    answers = (flat @ means.T).argmax(1)
    assert np.mean(answers == drawn["y"]) > 0.7


def test_every_digit_lies_inside_of_its_picture():
    ink = datasets.digits(2000, noise=0.0)["x"][:, 0]
    edges = [ink[:, 0], ink[:, -1], ink[:, :, 0], ink[:, :, -1]]
    assert max(edge.max() for edge in edges) < 0.5


def test_scenes_mark_the_pixels_of_two_digits():
    made = datasets.scenes(20, size=32, noise=0.0)
    assert made["x"].shape == (20, 1, 32, 32)
    assert made["y"].shape == (20, 32, 32)
    assert made["y"].dtype == np.int32
    np.testing.assert_array_equal(made["y"] > 0, made["x"][:, 0] > 0.5)
    for marks in made["y"]:
        assert marks[:, :16].any()
        assert marks[:, 16:].any()
        assert 1 <= len({*marks[marks > 0].tolist()}) <= 2


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("split", "begin"), [("train", "train"), ("test", "t10k")])
def test_fashion_mnist_is_read_packed_or_not(tmp_path, split, begin, is_packed):
    pictures = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    for name, array in (
        ("images-idx3", pictures),
        ("labels-idx1", np.array([9, 0, 4], np.uint8)),
    ):
        file = tmp_path / f"{begin}-{name}-ubyte"
        if is_packed:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            file.write_bytes(idx(array))
    read = datasets.fashion_mnist(tmp_path, split)
    np.testing.assert_array_equal(read["x"][:, 0], pictures.astype(np.float32) / 255)
    assert read["x"].dtype == np.float32
    assert read["y"].tolist() == [9, 0, 4]
    assert read["y"].dtype == np.int32


def test_who_has_no_fashion_mnist_is_told_how_to_get_it(tmp_path):
    with raises(FileNotFoundError):
        datasets.fashion_mnist(tmp_path)


def test_a_file_that_is_no_idx_file_is_named(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"<html>")
    with raises(ValueError):
        datasets.fashion_mnist(tmp_path)
