"""An image file of one's own, as ingest would store it."""

import io
from pathlib import Path

from PIL import Image

from storage.collect.normalise import ImageSettings, Refused, normalise
from storage.sample import Sample, sample_key

# As at ingest, but for the size of the file: cameras write larger ones than a caption list's server should send.
IMAGES = ImageSettings(max_bytes=200 * 2**20)
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")


def read_image(image: str | Path | bytes | Image.Image) -> Sample:
    """Return the image of a file, of its bytes, or of Pillow's, as ingest would store it: upright, RGB or grey, JPEG.

    Raises ValueError if it cannot be one.
    """
    name = str(image) if isinstance(image, str | Path) else "the image"
    try:
        if isinstance(image, Image.Image):
            image = _as_png(image)
        stored = normalise(image if isinstance(image, bytes) else Path(image).read_bytes(), IMAGES)
    except Refused as refused:
        raise ValueError(f"{name} cannot be taken: {refused.detail} ({refused.status})") from refused
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


def _as_png(image: Image.Image) -> bytes:
    """Raises ValueError if it has no pixels or too many, or pixels of more than 8 bits that PNG does not have."""
    width, height = image.size
    if not 0 < width * height <= IMAGES.max_pixels:  # before any of it is decoded
        raise ValueError(f"the image has {width} x {height} pixels; 1 to {IMAGES.max_pixels} are taken")
    if image.mode[0] in "FI" and image.mode not in _PNG_MODES:  # more bits than a conversion to RGB would leave
        raise ValueError(f"the image's pixels are of mode {image.mode}; convert it to 8 bits a channel")
    file = io.BytesIO()
    plain = image if image.mode in _PNG_MODES else image.convert("RGB")
    plain.save(file, "PNG", exif=image.getexif(), compress_level=1)
    return file.getvalue()
