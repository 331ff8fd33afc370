"""Changes of images, drawn anew for each sample: values to give to `Pipeline.map`.

    data = af.data.from_image_folder("photos").map(augment.Flip()).map(augment.Normalize())

A pipeline gives each of them random numbers of (seed, epoch, sample), so a run that goes on sees
the pictures that it would have seen. Images are [height, width, channels] in a sample until
`Normalize` makes them float32 [channels, height, width]; `MixUp` and `CutMix` work on a batch.
Pillow resizes (extra [data]).

Sources: random resized crops as in Szegedy et al., "Going deeper with convolutions", 2014, section
6; mixup: Zhang et al., 2017; CutMix: Yun et al., 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from actorflow.data.files import resized
from actorflow.data.source import DataError

__all__ = [
    "CenterCrop",
    "CutMix",
    "Flip",
    "Jitter",
    "MixUp",
    "Normalize",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
]

Image = npt.NDArray[Any]
Sample = Mapping[str, Any]


def _image(sample: Sample, field: str, reader: str = "") -> Image:
    """Return the image of a sample, of uint8 for a `reader` that needs values up to 255."""
    image = sample.get(field)
    if not isinstance(image, np.ndarray) or image.ndim != 3:
        came = f"an array of {image.ndim} axes" if isinstance(image, np.ndarray) else repr(image)
        raise DataError(f"augment: expected {field!r} to be [height, width, channels], came {came}")
    if reader and image.dtype != np.uint8:
        raise DataError(f"augment: {reader} expected an image of uint8, came {image.dtype}")
    return image


@dataclass(frozen=True, slots=True)
class Resize:
    """Resize to [size, size], bilinearly."""

    size: int
    field: str = "image"

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with its image resized."""
        return {**sample, self.field: resized(_image(sample, self.field), self.size, self.size)}


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cut [size, size] out of the middle, after the shorter side was resized to `resize`."""

    size: int
    resize: int | None = None
    field: str = "image"

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with its image cut. Raises DataError for an image that is smaller."""
        image = _image(sample, self.field)
        if self.resize is not None:
            scale = self.resize / min(image.shape[:2])
            height, width = (round(extent * scale) for extent in image.shape[:2])
            image = resized(image, height, width)
        height, width = image.shape[:2]
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return {**sample, self.field: _cut(image, top, left, self.size)}


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Cut [size, size] out anywhere, of the image with `padding` zeros on each side."""

    size: int
    padding: int = 0
    field: str = "image"

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with its image cut. Raises DataError for an image that is smaller."""
        image = _image(sample, self.field)
        if self.padding:
            image = np.pad(image, [(self.padding, self.padding)] * 2 + [(0, 0)])
        spare = [max(0, extent - self.size) for extent in image.shape[:2]]
        top, left = (int(rng.integers(most + 1)) for most in spare)
        return {**sample, self.field: _cut(image, top, left, self.size)}


def _cut(image: Image, top: int, left: int, size: int) -> Image:
    if top < 0 or left < 0 or min(image.shape[:2]) < size:
        raise DataError(
            f"augment: {size} x {size} cannot be cut out of an image of {image.shape[0]} x"
            f" {image.shape[1]}; resize it before"
        )
    return image[top : top + size, left : left + size]


_TRIES = 10
"""Boxes that are drawn before the middle of an image is taken that none of them fits in."""


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cut out a box of a random area and shape, and resize it to [size, size].

    Args:
        size: of the result.
        scale: the least and the largest share of the area.
        ratio: the least and the largest width over height.
        field: the name of the image.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    field: str = "image"

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with its image cut and resized."""
        image = _image(sample, self.field)
        rows, columns = image.shape[:2]
        top, left, height, width = self.box(rows, columns, rng)
        box = image[top : top + height, left : left + width]
        return {**sample, self.field: resized(box, self.size, self.size)}

    def box(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Return a box as (top, left, height, width)."""
        for _ in range(_TRIES):
            area = height * width * rng.uniform(*self.scale)
            ratio = float(np.exp(rng.uniform(*np.log(self.ratio))))
            wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < wide <= width and 0 < high <= height:
                top = int(rng.integers(height - high + 1))
                return top, int(rng.integers(width - wide + 1)), high, wide
        # The largest box of an allowed shape, in the middle.
        wide = min(width, round(height * self.ratio[1]))
        high = min(height, round(width / self.ratio[0]))
        return (height - high) // 2, (width - wide) // 2, high, wide


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror left and right, with a probability."""

    p: float = 0.5
    field: str = "image"

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample, its image mirrored or not."""
        image = _image(sample, self.field)
        return {**sample, self.field: image[:, ::-1] if rng.random() < self.p else image}


@dataclass(frozen=True, slots=True)
class Jitter:
    """Change brightness, contrast and saturation by factors of up to 1 - x to 1 + x."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    field: str = "image"

    def __call__(self, sample: Sample, rng: np.random.Generator) -> Sample:
        """Return the sample with the colours of its uint8 image changed."""
        image = _image(sample, self.field, "Jitter")
        pixels = image.astype(np.float32)
        amounts = (self.brightness, self.contrast, self.saturation)
        light, contrast, colour = (rng.uniform(max(0.0, 1 - x), 1 + x) for x in amounts)
        pixels *= np.float32(light)
        grey = _grey(pixels)
        pixels = _blended(pixels, grey.mean(), contrast)
        pixels = _blended(pixels, _grey(pixels)[..., None], colour)
        return {**sample, self.field: np.clip(np.rint(pixels), 0, 255).astype(np.uint8)}


def _grey(pixels: Image) -> Image:
    """Return the luminance by ITU-R BT.601; of one channel, itself."""
    if pixels.shape[2] != 3:
        return np.asarray(pixels.mean(2))
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114], np.float32))


def _blended(pixels: Image, other: Any, share: float) -> Image:
    return np.asarray(np.float32(share) * pixels + np.float32(1 - share) * other)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Make uint8 [height, width, channels] float32 [channels, height, width]: (x/255 - mean)/std.

    Mean and deviation, one for each channel, are those of ImageNet if none are given.
    """

    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    field: str = "image"

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with its image normalised."""
        image = _image(sample, self.field, "Normalize")
        mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
        if image.shape[2:] != mean.shape or mean.shape != std.shape:
            raise DataError(
                f"augment: Normalize has {mean.size} means and {std.size} deviations, and the image"
                f" {image.shape[2]} channels; give one of each for every channel"
            )
        # One product and one sum, written where the result lies.
        factors, offsets = 1 / (255 * std), -mean / std
        out = np.empty((image.shape[2], *image.shape[:2]), np.float32)
        for channel in range(image.shape[2]):
            np.multiply(image[..., channel], factors[channel], out=out[channel])
            out[channel] += offsets[channel]
        return {**sample, self.field: out}


def _one_hot(labels: Any, num_classes: int, field: str) -> npt.NDArray[np.float32]:
    labels = np.asarray(labels)
    if labels.ndim == 2:  # shares already
        return np.asarray(labels, np.float32)
    if labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"augment: {field!r} has classes from {labels.min()} to {labels.max()}, and"
            f" num_classes is {num_classes}"
        )
    return np.asarray(np.eye(num_classes, dtype=np.float32)[labels])


@dataclass(frozen=True, slots=True)
class MixUp:
    """Blend each image of a batch with another one, and its classes in the same shares.

    Labels become float32 [batch, num_classes], which `af.cross_entropy` takes.
    """

    num_classes: int
    alpha: float = 0.2
    field: str = "image"
    label: str = "label"

    def __call__(self, batch: Sample, rng: np.random.Generator) -> Sample:
        """Return the batch blended with itself in another order."""
        images = np.asarray(batch[self.field], np.float32)
        classes = _one_hot(batch[self.label], self.num_classes, self.label)
        share = np.float32(rng.beta(self.alpha, self.alpha))
        order = rng.permutation(len(images))
        return {
            **batch,
            self.field: share * images + (1 - share) * images[order],
            self.label: share * classes + (1 - share) * classes[order],
        }


@dataclass(frozen=True, slots=True)
class CutMix:
    """Put a box of another image of the batch into each, and share its classes by the area.

    Images are [batch, channels, height, width], as `Normalize` makes them.
    """

    num_classes: int
    alpha: float = 1.0
    field: str = "image"
    label: str = "label"

    def __call__(self, batch: Sample, rng: np.random.Generator) -> Sample:
        """Return the batch with boxes of itself in another order."""
        images = np.array(batch[self.field])
        if images.dtype == np.uint8:  # [batch, height, width, channels]
            raise DataError("augment: CutMix expected images made by Normalize, came uint8")
        classes = _one_hot(batch[self.label], self.num_classes, self.label)
        height, width = images.shape[-2:]
        side = (1 - rng.beta(self.alpha, self.alpha)) ** 0.5
        middle = rng.integers(height), rng.integers(width)
        (top, bottom), (left, right) = (
            (max(0, int(at - extent * side / 2)), min(extent, int(at + extent * side / 2)))
            for at, extent in zip(middle, (height, width), strict=True)
        )
        order = rng.permutation(len(images))
        images[..., top:bottom, left:right] = images[order][..., top:bottom, left:right]
        share = np.float32(1 - (bottom - top) * (right - left) / (height * width))
        return {
            **batch,
            self.field: images,
            self.label: share * classes + (1 - share) * classes[order],
        }
