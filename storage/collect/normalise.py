"""Normalisation of downloaded image files into the JPEGs that are stored.

A JPEG that needs no change is stored byte for byte. All others are decoded, rotated upright, converted to RGB or grey,
shrunk if they are too large, and encoded once. libjpeg decodes every stored image without a warning.
"""

import contextlib
import errno
import hashlib
import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from storage.collect.statuses import Refused, Status
from storage.memory import is_memory_error
from storage.settings import FORM, check, check_choices
from storage.signatures import describe_foreign, image_format

# Formats that are decoded, with their first bytes: only a few, because every decoder reads untrusted bytes.
_MAGIC = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "GIF": b"GIF8", "WEBP": b"RIFF", "BMP": b"BM"}
_MAGIC["TIFF"] = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_INSTALL = {"AVIF": "pillow>=11.3", "HEIF": "vlbert[heic]"}  # packages that decode further formats

# Errors that Pillow's decoders raise on damaged data (found by fuzzing, tests/storage/test_normalise.py).
_DAMAGE = (OSError, EOFError, SyntaxError, ValueError, IndexError, KeyError, TypeError, OverflowError)
_DAMAGE += (struct.error, zlib.error, RuntimeError)
with contextlib.suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()
Image.init()  # loads all of Pillow's readers now, because later Pillow silently skips a reader that it cannot load
# Formats that Pillow may open, here and elsewhere. Others are a risk: for an EPS, Pillow starts Ghostscript.
STORED_FORMATS = ("JPEG", "PNG")  # for images in shards
COLLECTED_FORMATS = (*_MAGIC, *sorted(_INSTALL.keys() & Image.OPEN.keys()))  # for images from the web
FILE_FORMATS = (*COLLECTED_FORMATS, *({"JPEG2000"} & Image.OPEN.keys()))  # for the user's own image files

# Errors of exhausted resources, with hints. They are not the fault of a row, so they give no status.
_RESOURCE_HINTS = dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`, or lower concurrency")
_RESOURCE_HINTS |= dict.fromkeys((errno.ENOMEM, errno.ENOBUFS), "lower concurrency or decode_threads")
_RESOURCE_HINTS |= dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free disk space there")

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# A progressive JPEG is decoded once per scan. Encoders write about ten; a file crafted to take hours has thousands.
_MAX_SCANS = 100


def resource_error_hint(error: BaseException) -> str:
    """Return advice if this machine has run out of memory, disk space or file descriptors, else ""."""
    if is_memory_error(error):
        return _RESOURCE_HINTS[errno.ENOMEM]
    return _RESOURCE_HINTS.get(error.errno, "") if isinstance(error, OSError) else ""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Settings for storing images. Every field affects the stored bytes, so manifests record all of them."""

    __pydantic_config__ = FORM

    max_bytes: int = 20 * 2**20
    """maximum size of a downloaded file, in bytes"""
    max_pixels: int = 50_000_000
    """maximum number of pixels of an image, by its header; decoding takes up to 25 bytes of memory per pixel"""
    max_side: int = 1024
    """maximum longer side of a stored image, in pixels; larger images are shrunk"""
    min_side: int = 32
    """minimum shorter side, in pixels; smaller images are refused"""
    max_aspect: float = 8.0
    """maximum ratio of the longer to the shorter side; more elongated images, such as banners, are refused"""
    jpeg_quality: int = 95
    """libjpeg's quality, 1..100, for images that are re-encoded"""

    def __post_init__(self):
        check_choices(self)
        for name in ("max_bytes", "max_pixels", "max_side", "min_side"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        check(self, 1 <= self.jpeg_quality <= 100, "jpeg_quality", "from 1 to 100")
        check(self, self.max_aspect >= 1, "max_aspect", "at least 1: the longer over the shorter side")
        if self.max_side < self.min_side * self.max_aspect:
            raise ValueError(
                f"max_side {self.max_side} is less than min_side {self.min_side} x max_aspect {self.max_aspect}, so "
                "shrinking a long image would bring its shorter side below min_side; raise max_side"
            )


@dataclass(frozen=True)
class NormalisedImage:
    """A JPEG to store. `sha256` is the hash of the original file. `flags` name the changes that were made."""

    jpeg: bytes
    width: int
    height: int
    sha256: str
    flags: tuple[str, ...]


def normalise(data: bytes, settings: ImageSettings) -> NormalisedImage:
    """Convert an image file to the JPEG to store, deterministically. Raises Refused if it is unusable."""
    if len(data) > settings.max_bytes:
        raise Refused(Status.TOO_BIG, f"{len(data)} bytes, more than {settings.max_bytes}")
    image = _open(data)
    width, height = image.size
    _check_size(width, height, settings)
    flags = []
    try:
        # Pillow calls a JPEG with several images MPO. Its first image is an ordinary JPEG.
        if image.format in ("JPEG", "MPO"):
            flags += _jpeg_flags(data, image)
        else:
            flags.append(str(image.format).lower())
            if getattr(image, "is_animated", False):
                flags.append("animated")
            # IHDR's bit depth; Pillow reduces colour images to 8 bits.
            if image.mode.startswith("I;16") or (image.format == "PNG" and data[24] == 16):
                flags.append("16_bit")
            image.load()
        orientation, readable = _read_orientation(image)
        flags += [] if readable else ["exif_unreadable"]
        must_change = set(flags) - {"exif_unreadable"} or orientation != 1 or max(image.size) > settings.max_side
        if not must_change and image.mode in ("RGB", "L"):
            return NormalisedImage(data, width, height, hashlib.sha256(data).hexdigest(), tuple(flags))
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(Status.TOO_MANY_PIXELS, str(error)) from error
    except _DAMAGE as error:
        if resource_error_hint(error):
            raise
        raise Refused(Status.TRUNCATED, f"{image.format}: {type(error).__name__}: {error}") from error
    image = _to_rgb_or_grey(image, flags)
    if orientation != 1:
        image = image.transpose(_UPRIGHT[orientation])
        flags.append("exif_rotated")
    if max(image.size) > settings.max_side:
        scale = settings.max_side / max(image.size)
        size = [max(1, round(side * scale)) for side in image.size]
        image = image.resize(size, Image.Resampling.LANCZOS)  # Pillow antialiases when it shrinks
        flags.append("resized")
    image.info = {}  # do not write the original file's comment
    file = io.BytesIO()
    image.save(file, "JPEG", quality=settings.jpeg_quality, subsampling="4:2:0", optimize=False)
    return NormalisedImage(file.getvalue(), *image.size, hashlib.sha256(data).hexdigest(), tuple(flags))


def begins_as_image(data: bytes) -> bool:
    """Return True if the first bytes are those of an image, also of a format that is not always read."""
    return any(map(data.startswith, _MAGIC.values())) or bool(image_format(data))


def _open(data: bytes) -> Image.Image:
    """Open an image, reading only its header. The format is detected from the bytes. Raises Refused on failure."""
    try:
        return Image.open(io.BytesIO(data), formats=COLLECTED_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Refused(Status.TOO_MANY_PIXELS, str(error)) from error
    except _DAMAGE as error:  # UnidentifiedImageError is an OSError
        if resource_error_hint(error):
            raise
        name = image_format(data) or next((name for name, magic in _MAGIC.items() if data.startswith(magic)), "")
        if name not in COLLECTED_FORMATS:
            unknown = f"is of no known format: none of {', '.join(COLLECTED_FORMATS)}"
            problem = f"is {name}, which is not decoded here" if name else unknown
            hint = f"; pip install '{_INSTALL[name]}', or convert it" if name in _INSTALL else ""
            detail = f"it {describe_foreign(data) or problem + hint}"
            raise Refused(Status.NOT_IMAGE, f"{detail}: {len(data)} bytes, first {data[:16]!r}") from error
        # Pillow's message for UnidentifiedImageError has a memory address.
        reason = "" if isinstance(error, UnidentifiedImageError) else f": {type(error).__name__}: {error}"
        raise Refused(Status.TRUNCATED, f"starts as {name}, but its header cannot be read{reason}") from error


def _check_size(width: int, height: int, settings: ImageSettings) -> None:
    if width * height > settings.max_pixels:
        raise Refused(Status.TOO_MANY_PIXELS, f"{width}x{height}, more than {settings.max_pixels}")
    shorter, longer = sorted((width, height))
    if shorter < settings.min_side:
        raise Refused(Status.BAD_GEOMETRY, f"{width}x{height}: the shorter side is under {settings.min_side}")
    if longer > settings.max_aspect * shorter:
        detail = f"{width}x{height}: the longer side is more than {settings.max_aspect:g} times the shorter"
        raise Refused(Status.BAD_GEOMETRY, detail)


def _jpeg_flags(data: bytes, image: Image.Image) -> list[str]:
    """Check a JPEG by decoding it. Return ["repaired"] if it has stray bytes and must be encoded again, else [].

    Pillow ignores stray bytes, but simplejpeg, which training uses, raises an error. To save time, the image is decoded
    only to grey, at an eighth of its size. Raises ValueError or Refused if data is missing.
    """
    import simplejpeg

    scans = data.count(b"\xff\xda")
    if scans > _MAX_SCANS:
        raise Refused(Status.TOO_MANY_PIXELS, f"{scans} scans of {image.width}x{image.height}, more than {_MAX_SCANS}")
    height, width = simplejpeg.decode_jpeg_header(data)[:2]
    if (width, height) != image.size:
        raise Refused(Status.TRUNCATED, f"two sizes in one JPEG: {width}x{height} and {image.width}x{image.height}")
    try:
        simplejpeg.decode_jpeg(data, colorspace="GRAY", min_height=1, min_width=1, min_factor=8)
    except ValueError as error:
        if "extraneous bytes" not in str(error):
            raise
        return ["repaired"]
    return []


def _read_orientation(image: Image.Image) -> tuple[int, bool]:
    """Return the EXIF orientation (1 to 8), and whether EXIF is readable. Return (1, True) if there is no EXIF."""
    exif = Image.Exif()
    try:
        # Not image.getexif(), which hides errors of the JPEG and uses XMP, which browsers ignore.
        exif.load(image.info.get("exif", b""))
        orientation = exif.get(_ORIENTATION, 1)
    except _DAMAGE:
        return 1, False
    return (int(orientation), True) if orientation in range(1, 9) else (1, True)


def _to_rgb_or_grey(image: Image.Image, flags: list[str]) -> Image.Image:
    """Convert a decoded image to mode RGB or L, and append the changes to `flags`."""
    grey = image.mode in ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N")
    if image.mode.startswith("I"):
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise Refused(Status.NOT_IMAGE, f"pixel values {pixels.min()}..{pixels.max()} are not 16-bit grey")
        reduced = np.empty(pixels.shape, dtype=np.uint8)
        for i, line in enumerate(pixels):  # line by line, because a 32-bit copy of the image would be large
            reduced[i] = (line.astype(np.uint32) + 128) // 257  # 257 = 65535 / 255
        return Image.fromarray(reduced)
    if image.mode in ("P", "PA"):
        flags.append("palette")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            flags.append("alpha")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    elif image.mode == "CMYK":
        flags.append("cmyk")
    elif image.mode not in ("1", "L", "RGB", "RGBX", "YCbCr", "P"):
        raise Refused(Status.NOT_IMAGE, f"pixels of mode {image.mode} cannot be converted to RGB or grey")
    return image.convert("L" if grey else "RGB")
