"""A user's own image: which formats are read, and how, and which images are refused."""

import io
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import tiny_sample

from detectors.examples import BAD_IMAGE, read_resized
from detectors.faster_rcnn import DEMO
from detectors.ground_truth import LabelledImage
from detectors.image_file import read_image


def new(mode: str, size: tuple[int, int], kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "named"),
    [
        (b"no picture at all", "(not_image)"),
        (new("RGB", (90, 60), "JPEG2000"), "it is JPEG 2000, which is not decoded here"),
        (new("RGB", (90, 60), "PNG")[:60], "(truncated)"),
        (new("RGB", (20, 20), "PNG"), "the shorter side is under 32"),
        (Image.new("I;16B", (90, 60)), "the image has mode I;16B; convert it"),
        (Image.new("L", (20, 20)), "the image is refused: "),
        (Image.new("RGB", (0, 9)), "the image has 0 x 9 pixels"),
        (Image.new("1", (9000, 9000)), "9000 x 9000 pixels; 1 to 50000000 are allowed"),
        (Image.open(io.BytesIO(new("RGB", (90, 60), "PNG")[:50])), "the image cannot be read: "),
        (Path("/gone.jpg"), "/gone.jpg cannot be read: No such file"),
        (Path("/"), "/ cannot be read: Is a directory"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused(tmp_path, image, named):
    file = image
    if isinstance(image, bytes):
        file = tmp_path / "photo.any"
        file.write_bytes(image)
    with pytest.raises(ValueError, match=re.escape(named)) as stopped:
        read_image(file)
    assert not isinstance(image, bytes) or str(file) in str(stopped.value)


def test_ghostscript_is_never_started(tmp_path, monkeypatch):
    """An EPS by another name: Pillow would hand it to `gs`, which is a program that runs programs."""
    mark, gs = tmp_path / "ran", tmp_path / "bin" / "gs"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(gs.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    file = tmp_path / "photo.jpg"
    file.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(ValueError, match=r"photo.jpg is refused: .*\(not_image\)"):
        read_image(file)
    with pytest.raises(BAD_IMAGE):
        read_resized(LabelledImage("a", file, 100, 100, *(np.zeros(0),) * 2, ()), DEMO)
    assert not mark.exists()
    with pytest.raises(subprocess.CalledProcessError), Image.open(file) as opened:  # it is hostile
        opened.load()
    assert mark.exists()


def test_an_image_may_be_a_file_its_bytes_or_pillows(tmp_path):
    file = tmp_path / "photo.jpg"
    file.write_bytes(tiny_sample(3).image)
    image = Image.open(file)
    grey, turned = image.convert("L"), image.getexif()
    for given in (file, str(file), file.read_bytes(), image, grey, image.convert("RGBA"), image.convert("CMYK")):
        read, expected = read_image(given), grey if given is grey else image
        assert (read.width, read.height) == image.size
        found = np.asarray(Image.open(io.BytesIO(read.image))).astype(int)
        assert np.abs(found - np.asarray(expected).astype(int)).mean() < 3
    turned[0x0112] = 6
    assert read_image(image).width == image.height, "upright"
