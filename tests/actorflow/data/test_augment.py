"""Changes of images: against formulas of their papers, and Pillow itself."""

import pickle

import numpy as np
import pytest
from error_texts import raises

import actorflow as af
from actorflow.data import DataError
from actorflow.data.augment import (
    CenterCrop,
    CutMix,
    Flip,
    Jitter,
    MixUp,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
)

Image = pytest.importorskip("PIL.Image")


def photo(height=12, width=10, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, channels), dtype=np.uint8)


def test_resizing_is_pillows():
    image = photo()
    expected = np.asarray(Image.fromarray(image).resize((5, 5), Image.Resampling.BILINEAR))
    assert (Resize(5)({"image": image, "label": 1})["image"] == expected).all()
    grey = Resize(5)({"image": image[..., :1]})["image"]
    assert grey.shape == (5, 5, 1)


def test_crops_are_windows_of_the_image():
    image = photo()
    assert (CenterCrop(4)({"image": image})["image"] == image[4:8, 3:7]).all()
    assert CenterCrop(8, resize=16)({"image": image})["image"].shape == (8, 8, 3)
    places = set()
    for seed in range(200):
        cut = RandomCrop(9)({"image": image}, np.random.default_rng(seed))["image"]
        (place,) = [
            (y, x) for y in range(4) for x in range(2) if (image[y : y + 9, x : x + 9] == cut).all()
        ]
        places.add(place)
    assert places == {(y, x) for y in range(4) for x in range(2)}
    padded = RandomCrop(16, padding=4)({"image": image}, np.random.default_rng(0))["image"]
    assert padded.shape == (16, 16, 3)
    assert not padded[[0, -1]].all()


def test_a_random_box_has_the_area_and_shape_that_are_allowed():
    crop = RandomResizedCrop(6, scale=(0.2, 0.5))
    for seed in range(300):
        top, left, height, width = crop.box(40, 60, np.random.default_rng(seed))
        assert 0 <= top <= 40 - height
        assert 0 <= left <= 60 - width
        assert 0.18 < height * width / 2400 < 0.53
        assert 0.65 < width / height < 1.5
    flat = RandomResizedCrop(6, scale=(1.0, 1.0)).box(10, 90, np.random.default_rng(0))
    assert flat == (0, 38, 10, 13)


def test_a_mirrored_image_is_mirrored_half_of_the_time():
    image = photo()
    turned = [
        (Flip()({"image": image}, np.random.default_rng(s))["image"] == image[:, ::-1]).all()
        for s in range(400)
    ]
    assert 160 < sum(turned) < 240
    assert not (Flip(0.0)({"image": image}, np.random.default_rng(0))["image"] != image).any()


def test_jitter_without_amounts_changes_nothing_and_with_them_stays_in_range():
    image = photo()
    still = Jitter(0, 0, 0)({"image": image}, np.random.default_rng(0))["image"]
    assert (still == image).all()
    light = Jitter(0.5, 0, 0)({"image": image}, np.random.default_rng(1))["image"]
    factor = np.random.default_rng(1).uniform(0.5, 1.5)
    assert np.abs(light - np.clip(image * factor, 0, 255)).max() <= 1
    grey = Jitter(0, 0, 1)({"image": image}, np.random.default_rng(1))["image"]
    assert grey.dtype == np.uint8


def test_normalising_is_the_formula_with_channels_first():
    image = photo()
    sample = Normalize()({"image": image})
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((image / 255 - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(sample["image"], expected, rtol=1e-5, atol=1e-5)
    assert sample["image"].dtype == np.float32
    assert sample["image"].flags.c_contiguous


def test_mixup_and_cutmix_share_images_and_classes_alike():
    images = np.stack([np.full((3, 8, 8), n, np.float32) for n in range(4)])
    batch = {"image": images, "label": np.arange(4)}
    mixed = MixUp(4)(batch, np.random.default_rng(3))
    means = mixed["image"].mean((1, 2, 3))
    np.testing.assert_allclose(means, mixed["label"] @ np.arange(4), rtol=1e-5)
    np.testing.assert_allclose(mixed["label"].sum(1), 1, rtol=1e-6)
    for seed in range(20):
        cut = CutMix(4)(batch, np.random.default_rng(seed))
        means = cut["image"].mean((1, 2, 3))
        np.testing.assert_allclose(means, cut["label"] @ np.arange(4), rtol=1e-5, atol=1e-5)
    assert (images[1] == 1).all(), "the batch itself is left alone"
    again = MixUp(4)(mixed, np.random.default_rng(4))
    np.testing.assert_allclose(again["label"].sum(1), 1, rtol=1e-6)


def test_a_pipeline_of_changes_gives_the_same_pictures_each_time():
    items = [{"image": photo(seed=n), "label": n % 3} for n in range(8)]
    data = af.data.from_dataset(items)
    for change in (RandomResizedCrop(6), Flip(), Jitter(), Normalize()):
        data = data.map(change)
        assert pickle.loads(pickle.dumps(change)) == change
    one, other = (data.repeat(2).batch(4).map(MixUp(3)) for _ in range(2))
    pairs = list(zip(one, other, strict=True))
    assert all((a["image"] == b["image"]).all() for a, b in pairs)
    assert (pairs[0][0]["image"] != pairs[2][0]["image"]).any(), "other pictures in each epoch"
    assert pairs[0][0]["image"].shape == (4, 3, 6, 6)


REFUSED = {
    "too small": lambda: CenterCrop(11)({"image": photo()}),
    "too small at random": lambda: RandomCrop(11)({"image": photo()}, np.random.default_rng(0)),
    "no image": lambda: Flip()({"image": 3}, np.random.default_rng(0)),
    "no axes": lambda: Flip()({"image": np.ones((2, 2))}, np.random.default_rng(0)),
    "normalised before": lambda: Resize(3)(Normalize()({"image": photo()})),
    "channels": lambda: Normalize()({"image": photo(channels=1)}),
    "jitter of floats": lambda: Jitter()({"image": np.ones((2, 2, 3))}, np.random.default_rng(0)),
    "shares of 1": lambda: Normalize()({"image": photo().astype(np.float32) / 255}),
    "channels last": lambda: CutMix(2)(
        {"image": np.stack([photo()] * 2), "label": np.array([0, 1])}, np.random.default_rng(0)
    ),
    "classes": lambda: MixUp(2)(
        {"image": np.ones((2, 3, 4, 4)), "label": np.array([0, 2])}, np.random.default_rng(0)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused(name):
    with raises(DataError):
        REFUSED[name]()
