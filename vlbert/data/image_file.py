"""An image file of one's own, as ingest would store it."""

import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from storage.collect.normalise import FILE_FORMATS, ImageSettings, Refused, normalise
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
        data = image if isinstance(image, bytes) else Path(image).read_bytes()
        try:
            stored = normalise(data, IMAGES)
        except Refused as refused:
            if refused.status != "not_image":
                raise
            stored = normalise(_as_png(data), IMAGES)
    except Refused as refused:
        raise ValueError(f"{name} cannot be taken: {refused.detail} ({refused.status})") from refused
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
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
    """Return a PNG of Pillow's image, or of a file in a format of FILE_FORMATS that ingest does not take, such as TIFF.

    Raises Refused if it is none, has no pixels or too many, or pixels of more than 8 bits that PNG does not have.
    """
    file = io.BytesIO()
    try:
        opened = Image.open(io.BytesIO(image), formats=FILE_FORMATS) if isinstance(image, bytes) else image
        width, height = opened.size
        if not width * height:
            raise Refused("bad_geometry", f"{width}x{height}: it has no pixels")
        if width * height > IMAGES.max_pixels:  # before any of it is decoded
            raise Refused("too_many_pixels", f"{width}x{height}, more than {IMAGES.max_pixels}")
        if opened.mode[0] in "FI" and opened.mode not in _PNG_MODES:  # more bits than a conversion to RGB would leave
            raise Refused("not_image", f"its pixels are of mode {opened.mode}; save it with 8 bits a channel")
        plain = opened if opened.mode in _PNG_MODES else opened.convert("RGB")
        plain.save(file, "PNG", exif=opened.getexif(), compress_level=1)
    except UnidentifiedImageError as error:
        found = f"{len(image)} bytes, first {image[:16]!r}" if isinstance(image, bytes) else str(error)
        raise Refused("not_image", f"none of {', '.join(FILE_FORMATS)}: {found}") from error
    except Image.DecompressionBombError as error:
        raise Refused("too_many_pixels", str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:
        raise Refused("truncated", f"{type(error).__name__}: {error}") from error
    return file.getvalue()
