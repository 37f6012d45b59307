"""Read a user's image file, convert it to the form in which datasets store images, and find its regions."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from detectors.detect import FasterRCNNDetector
from storage.collect.normalise import ImageSettings, Refused, normalise
from storage.sample import Sample, check_sample, sample_key

# As for datasets, except for the file size: a camera's file may be larger than a downloaded one.
IMAGES = ImageSettings(max_bytes=200 * 2**20)
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


AnyImage = str | Path | bytes | Image.Image | np.ndarray | Tensor


def read_image(image: AnyImage) -> Sample:
    """Read a user's image as datasets store it: an upright JPEG, RGB or grey. Raises ValueError if it is not valid.

    `image` is a file, bytes, a Pillow image, or an array as `from_array` takes it.
    """
    name = str(image) if isinstance(image, str | Path) else "the image"
    if isinstance(image, np.ndarray | Tensor):
        image = from_array(image)
    try:
        if isinstance(image, Image.Image):
            image = _encode_png(image)  # as if read from a file
        stored = normalise(image if isinstance(image, bytes) else Path(image).read_bytes(), IMAGES)
    except Refused as refused:
        raise ValueError(f"{name} is refused: {refused.detail} ({refused.status})") from refused
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return Sample(
        key=sample_key(name, ""),
        image=stored.jpeg,
        caption="",
        url=name,
        width=stored.width,
        height=stored.height,
        sha256=stored.sha256,
        flags=stored.flags,
    )


def detect_regions(sample: Sample, detector: FasterRCNNDetector) -> Sample:
    """Return the sample with the regions that the detector finds. Raises ValueError if it finds none."""
    (regions,) = detector.detect([sample])
    if isinstance(regions, str):
        raise ValueError(f"{sample.url}: the detector finds no regions: {regions}")
    sample = replace(sample, regions=regions)
    check_sample(sample)
    return sample


def from_array(array: np.ndarray | Tensor) -> Image.Image:
    """Return an array or tensor as an image. Raises ValueError if it is none.

    It is [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, and has integers from 0 to 255 or floats from 0 to 1.
    """
    values = array.detach().cpu().float().numpy() if isinstance(array, Tensor) and array.is_floating_point() else array
    values = np.asarray(values)
    if values.ndim == 3 and values.shape[0] in (1, 3, 4) and values.shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    shape, limit = values.shape, 1 if values.dtype.kind == "f" else 255
    if values.ndim not in (2, 3) or 0 in shape or (values.ndim == 3 and shape[2] not in (1, 3, 4)):
        raise ValueError(f"an image is {list(shape)}; give [height, width, channels] or [channels, height, width]")
    if values.dtype.kind not in "fiu" or not (values.min() >= 0 and values.max() <= limit):
        kind = f"{values.dtype} from {values.min()} to {values.max()}"
        raise ValueError(f"an image has {kind}; give integers from 0 to 255, or floats from 0 to 1")
    if limit == 1:
        values = np.rint(values * 255)
    return Image.fromarray(values.astype(np.uint8).squeeze(2) if shape[2:] == (1,) else values.astype(np.uint8))


def _encode_png(image: Image.Image) -> bytes:
    """Encode an image as PNG. Raises ValueError if it is empty or too large, or if its mode has too many bits."""
    width, height = image.size
    if not 0 < width * height <= IMAGES.max_pixels:  # before any of it is decoded
        raise ValueError(f"the image has {width} x {height} pixels; 1 to {IMAGES.max_pixels} are allowed")
    if image.mode[0] in "FI" and image.mode not in _PNG_MODES:  # a conversion to RGB would lose bits
        raise ValueError(f"the image has mode {image.mode}; convert it to 8 bits per channel")
    file = io.BytesIO()
    converted = image if image.mode in _PNG_MODES else image.convert("RGB")
    converted.save(file, "PNG", exif=image.getexif(), compress_level=1)
    return file.getvalue()
