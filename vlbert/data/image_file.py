"""Read a user's image file, and convert it to the form in which datasets store images."""

import io
from pathlib import Path

from PIL import Image

from storage.collect.normalise import ImageSettings, Refused, normalise
from storage.sample import Sample, sample_key

# As for datasets, except for the file size: a camera's file may be larger than a downloaded one.
IMAGES = ImageSettings(max_bytes=200 * 2**20)
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def read_image(image: str | Path | bytes | Image.Image) -> Sample:
    """Read a user's image as datasets store it: an upright JPEG, RGB or grey. Raises ValueError if it is not valid."""
    name = str(image) if isinstance(image, str | Path) else "the image"
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
