"""Image bytes become an upright RGB or grey JPEG, or a refusal."""

import dataclasses
import hashlib
import io
import random
import re
import struct
import zlib

import foreign
import numpy as np
import pytest
import simplejpeg
from PIL import Image
from web import draw, encode

from storage.collect.normalise import ImageSettings, normalise
from storage.collect.statuses import Refused

SETTINGS = ImageSettings(max_side=512)


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data))).astype(int)


def refusal(data: bytes, **settings: object) -> str:
    with pytest.raises(Refused) as refused:
        normalise(data, ImageSettings(**settings))
    assert " at 0x" not in refused.value.detail  # Pillow's: two runs would write two manifests
    return refused.value.status


PNG = b"\x89PNG\r\n\x1a\n"


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing, so that a refusal by size can only come from the header."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT"


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


UNREADABLE_EXIF = encode(draw(), exif=b"Exif\0\0II*\0" + b"\xff" * 40).replace(b"II*\0", b"XX*\0", 1)


UNCHANGED = [
    encode(draw()),
    encode(draw(), progressive=True, quality=30),
    encode(draw(), exif=exif(1), comment=b"kept"),
]


@pytest.mark.parametrize("data", [*UNCHANGED, UNREADABLE_EXIF, encode(draw()) + b"trailing bytes"])
def test_a_jpeg_that_needs_no_change_is_stored_byte_for_byte(data: bytes):
    normalised = normalise(data, SETTINGS)
    assert normalised.jpeg == data
    assert normalised.flags == (("exif_unreadable",) if data is UNREADABLE_EXIF else ())
    assert normalised.sha256 == hashlib.sha256(data).hexdigest()
    assert (normalised.width, normalised.height) == Image.open(io.BytesIO(data)).size


def frames(form: str, **options: object) -> bytes:
    return encode(draw(), form, save_all=True, append_images=[draw(seed=1)], **options)


OTHER_FORMATS = {
    "png": (encode(draw(), "PNG"), "RGB", ("png",), draw()),
    "png 1 bit": (encode(draw(mode="1"), "PNG"), "L", ("png",), draw(mode="1").convert("L")),
    "png palette": (encode(draw().quantize(), "PNG"), "RGB", ("png", "palette"), draw().quantize().convert("RGB")),
    "webp": (encode(draw(), "WEBP", lossless=True), "RGB", ("webp",), draw()),
    "webp animated": (frames("WEBP", lossless=True), "RGB", ("webp", "animated"), draw()),
    "gif animated": (frames("GIF"), "RGB", ("gif", "animated", "palette"), draw().quantize().convert("RGB")),
    "bmp": (encode(draw(), "BMP"), "RGB", ("bmp",), draw()),
    "tiff": (encode(draw(), "TIFF"), "RGB", ("tiff",), draw()),
    "tiff big-endian": (encode(draw(), "TIFF", big_tiff=True), "RGB", ("tiff",), draw()),
    "tiff of a camera": (encode(draw(), "TIFF", compression="jpeg"), "RGB", ("tiff",), draw()),
    "tiff of a scanner": (
        encode(draw(mode="1"), "TIFF", compression="group4"),
        "L",
        ("tiff",),
        draw(mode="1").convert("L"),
    ),
    "tiff cmyk": (encode(draw(mode="CMYK"), "TIFF"), "RGB", ("tiff", "cmyk"), draw(mode="CMYK").convert("RGB")),
    "tiff ycbcr": (encode(draw(mode="YCbCr"), "TIFF"), "RGB", ("tiff",), draw(mode="YCbCr").convert("RGB")),
    "tiff pages": (frames("TIFF"), "RGB", ("tiff", "animated"), draw()),
    "avif": (encode(draw(), "AVIF", quality=95), "RGB", ("avif",), draw()),
    "heif": (encode(draw(), "HEIF", quality=95), "RGB", ("heif",), draw()),
    "cmyk": (encode(draw(mode="CMYK")), "RGB", ("cmyk",), draw(mode="CMYK").convert("RGB")),
}


@pytest.mark.parametrize(("data", "mode", "flags", "like"), OTHER_FORMATS.values(), ids=OTHER_FORMATS)
def test_other_formats_become_rgb_or_grey_jpeg(data: bytes, mode: str, flags: tuple[str, ...], like: Image.Image):
    normalised = normalise(data, SETTINGS)
    stored = Image.open(io.BytesIO(normalised.jpeg))
    assert (stored.format, stored.mode, stored.size) == ("JPEG", mode, (96, 64))
    assert normalised.flags == flags
    assert np.abs(np.asarray(stored).astype(int) - np.asarray(like)).mean() < 8  # what JPEG costs
    assert normalised.sha256 == hashlib.sha256(data).hexdigest()


def test_16_bit_grey_is_reduced_exactly():
    values = np.arange(2**16, dtype=np.uint16).reshape(256, 256).repeat(4, axis=0).repeat(4, axis=1)
    data = encode(Image.fromarray(values), "PNG")
    normalised = normalise(data, dataclasses.replace(SETTINGS, max_side=4096, jpeg_quality=100))
    assert normalised.flags == ("png", "16_bit")
    stored = np.asarray(Image.open(io.BytesIO(normalised.jpeg)), dtype=np.float64)
    assert np.abs(stored - values / 257).max() < 2.5  # half a step, and what JPEG at its best costs
    assert abs((stored - values / 257).mean()) < 0.02


@pytest.mark.parametrize(("mode", "form"), [("RGBA", "PNG"), ("LA", "PNG"), ("RGBA", "WEBP"), ("P", "GIF")])
def test_transparent_parts_become_white(mode: str, form: str):
    image = draw(mode="RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 48, 64))
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(image if mode == "P" else image.convert(mode), form, **options)
    normalised = normalise(data, SETTINGS)
    stored = pixels(normalised.jpeg)
    assert "alpha" in normalised.flags
    assert stored[:, :40].min() > 245  # 48 is the border; JPEG rings near it
    assert stored[:, 56:].mean() < 220
    assert (stored.ndim == 2) == (mode == "LA")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "AVIF"])
@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_orientation_is_applied_once(orientation: int, form: str):
    upright = draw(96, 64)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose values that lay it down as a camera would
    lying = upright.transpose(Image.Transpose(undo[orientation]))
    normalised = normalise(encode(lying, form, exif=exif(orientation)), SETTINGS)
    stored = Image.open(io.BytesIO(normalised.jpeg))
    assert "exif_rotated" in normalised.flags
    assert (normalised.width, normalised.height) == stored.size == (96, 64)
    # Encoded once or twice; a wrong turn costs over 40.
    assert np.abs(np.asarray(stored).astype(int) - np.asarray(upright)).mean() < 12
    assert stored.getexif().get(0x0112, 1) == 1
    again = normalise(normalised.jpeg, SETTINGS)
    assert (again.jpeg, again.flags) == (normalised.jpeg, ())


@pytest.mark.parametrize("form", ["TIFF", "HEIF"])
def test_an_image_that_its_decoder_turns_is_not_turned_twice(form: str):
    lying = draw(96, 64).transpose(Image.Transpose.ROTATE_90)
    normalised = normalise(encode(lying, form, exif=exif(6)), SETTINGS)
    assert (normalised.width, normalised.height) == (96, 64)
    assert np.abs(pixels(normalised.jpeg) - np.asarray(draw(96, 64)).astype(int)).mean() < 12


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (
            b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99),
            r"it is HEIF, which is not decoded.*pip install 'vlbert\[heic\]'",
        ),
        (encode(draw(), "AVIF"), "it is AVIF, which is not decoded here; pip install 'pillow>=11.3', or convert it"),
        (encode(draw(), "JPEG2000"), "it is JPEG 2000, which is not decoded here"),
        (b"<svg/>", "it is SVG"),
        (b"%PDF-1.4", "it is PDF"),
        (foreign.LFS, "it is a Git LFS pointer; run git lfs pull"),
        (b"<html>", "it is a web page"),
        (b"\0" * 5000, "it is of no known format: none of JPEG, .*5000 bytes"),
    ],
)
def test_what_is_not_decoded_is_called_by_its_name(data: bytes, named: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.collect.normalise.COLLECTED_FORMATS", ("JPEG", "PNG"))  # of an older Pillow
    with pytest.raises(Refused, match="not_image") as refused:
        normalise(data, SETTINGS)
    assert re.match(named, refused.value.detail)


@pytest.mark.parametrize(
    ("size", "expected"), [((768, 1024), (384, 512)), ((2048, 256), (512, 64)), ((512, 300), (512, 300))]
)
def test_a_large_image_is_reduced_to_max_side_and_keeps_its_shape(size: tuple[int, int], expected: tuple[int, int]):
    normalised = normalise(encode(draw(*size), "PNG"), SETTINGS)
    assert (normalised.width, normalised.height) == expected == Image.open(io.BytesIO(normalised.jpeg)).size
    assert normalised.flags == (("png",) if size == expected else ("png", "resized"))


def test_stray_bytes_in_a_jpeg_are_repaired_so_that_training_can_read_it():
    data = encode(draw())
    stray = data[:-2] + b"\0" * 600 + b"\xff\xd9"
    with pytest.raises(ValueError, match="extraneous"):
        simplejpeg.decode_jpeg(stray)
    normalised = normalise(stray, SETTINGS)
    assert normalised.flags == ("repaired",)
    assert np.abs(simplejpeg.decode_jpeg(normalised.jpeg).astype(int) - pixels(data)).mean() < 4


JPEG, SCANS = encode(draw()), encode(draw(), progressive=True)
LAST_SCAN = SCANS.rindex(b"\xff\xda")
FORMS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "HEIF")
WHOLE = [encode(draw(), form) for form in FORMS]
REFUSED = [
    *((data[: int(len(data) * part)], {}, "truncated") for data in WHOLE for part in (0.3, 0.6, 0.95)),
    *(
        (data, {}, "truncated")
        for data in (JPEG[: len(JPEG) // 2] + b"\xff\xd9", JPEG[:100], PNG, b"RIFF\0\0\0\0WEBPxxxx")
    ),
    *((data, {}, "not_image") for data in (b"", b"<html>", b"\0" * 5000, b"<svg/>", b"RIF", b"%PDF")),
    # Past the two limits at which Pillow itself warns and raises, and just over ours.
    *((png_header(*size), {}, "too_many_pixels") for size in ((30000, 30000), (60000, 60000), (10001, 5000))),
    (SCANS[:LAST_SCAN] + SCANS[LAST_SCAN:-2] * 200 + b"\xff\xd9", {}, "too_many_pixels"),
    (JPEG, {"max_pixels": 96 * 64 - 1}, "too_many_pixels"),
    (JPEG, {"max_bytes": len(JPEG) - 1}, "too_big"),
    *((encode(draw(*size)), {}, "bad_geometry") for size in ((31, 64), (64, 31), (321, 40))),
]


@pytest.mark.parametrize(("data", "limits", "status"), REFUSED)
def test_files_are_refused_by_status(data: bytes, limits: dict[str, int], status: str):
    assert refusal(data, **limits) == status


@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_file_is_stored_readable_or_refused(form: str):
    rng = random.Random(form)
    modes = {"JPEG": ["RGB", "L", "CMYK"], "BMP": ["RGB", "P"], "TIFF": ["RGB", "CMYK", "P", "1"]}
    modes |= dict.fromkeys(("AVIF", "HEIF"), ["RGB", "RGBA"])
    options = {"exif": exif(6)} if form in ("JPEG", "PNG", "WEBP") else {}
    files = [encode(draw(48, 40, mode), form, **options) for mode in modes.get(form, ["RGB", "RGBA", "P"])]
    stored, statuses = 0, set()
    for turn in range(300):
        damaged = bytearray(files[turn % len(files)])
        for _ in range(rng.choice([1, 2, 8])):
            place = rng.randrange(len(damaged)) if rng.random() < 0.4 else rng.randrange(min(120, len(damaged)))
            damaged[place] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            normalised = normalise(bytes(damaged), ImageSettings(max_pixels=2_000_000, min_side=8))
        except Refused as refused:
            statuses.add(refused.status)
            continue
        stored += 1
        assert simplejpeg.decode_jpeg(normalised.jpeg).shape[:2] == (normalised.height, normalised.width)
    assert stored > 0
    assert "truncated" in statuses
