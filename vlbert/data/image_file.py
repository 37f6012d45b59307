"""An image file of one's own, as ingest would store it."""

import io
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from storage.collect.normalise import FILE_FORMATS, ImageSettings, Refused, normalise
from storage.sample import Sample, sample_key

# As at ingest, but for the size of the file: cameras write larger ones than a caption list's server should send.
IMAGES = ImageSettings(max_bytes=200 * 2**20)


def read_image(image: str | Path | bytes | Image.Image) -> Sample:
    """The image of a file, of a file's bytes, or of Pillow's, as ingest would store it: upright, RGB or grey, JPEG.

    ValueError says why it cannot be one.
    """
    name = str(image) if isinstance(image, str | Path) else "the image"
    try:
        if isinstance(image, Image.Image):
            image = _as_png(image)
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
    except Refused as refused:
        raise ValueError(f"{name} cannot be taken: {refused.detail} ({refused.status})") from refused
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    try:
        try:
            stored = normalise(data, IMAGES)
        except Refused as refused:
            if refused.status != "not_image":
                raise
            stored = normalise(_as_png(data), IMAGES)
    except Refused as refused:
        raise ValueError(f"{name} cannot be taken: {refused.detail} ({refused.status})") from refused
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


def _as_png(image: bytes | Image.Image) -> bytes:
    """A PNG of Pillow's image, or of a file in a format of FILE_FORMATS that ingest does not take, such as TIFF;
    Refused where it is none, has no pixels, or holds some that nobody can bring to 8 bits."""
    try:
        if isinstance(image, Image.Image):
            return _png_of(image)
        with Image.open(io.BytesIO(image), formats=FILE_FORMATS) as opened:
            return _png_of(opened)
    except UnidentifiedImageError as error:
        found = f"{len(image)} bytes, first {image[:16]!r}" if isinstance(image, bytes) else str(error)
        raise Refused("not_image", f"none of {', '.join(FILE_FORMATS)}: {found}") from error
    except Image.DecompressionBombError as error:
        raise Refused("too_many_pixels", str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused("truncated", f"{type(error).__name__}: {error}") from error


def _png_of(opened: Image.Image) -> bytes:
    width, height = opened.size
    if not width * height:
        raise Refused("bad_geometry", f"{width}x{height}: it has no pixels")
    if width * height > IMAGES.max_pixels:  # before any of it is decoded
        raise Refused("too_many_pixels", f"{width}x{height}, more than {IMAGES.max_pixels}")
    file = io.BytesIO()
    _plain(opened).save(file, "PNG", exif=opened.getexif(), compress_level=1)
    return file.getvalue()


def _plain(opened: Image.Image) -> Image.Image:
    """The image in a mode that a PNG holds, its grey of 16 bits where it has more than 8."""
    if opened.mode == "F":
        raise Refused("not_image", "its pixels are floating-point numbers; save it with 8 or 16 bits a channel")
    if opened.mode in ("I", "I;16B", "I;16L", "I;16N"):
        values = np.asarray(opened)
        if values.min() < 0 or values.max() > 65535:
            raise Refused(
                "not_image",
                f"its pixels are 32-bit numbers, {values.min()} to {values.max()}; save it with 8 or 16 bits a channel",
            )
        return Image.fromarray(values.astype(np.uint16))
    return opened if opened.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else opened.convert("RGB")
