"""storage.sample: samples as members of a tar, and what is refused."""

import dataclasses
import io
import pickle
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import Members, member, metadata, packed
from PIL import Image
from seeded import JPEG, as_dict, seeded_regions, seeded_sample

from storage.sample import (
    MAX_PIXELS,
    BadSample,
    Sample,
    check_sample,
    from_members,
    jpeg_size,
    pack_regions,
    to_members,
)

_KEPT = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.text(),
    st.text(),
    st.none() | st.integers(0, 7),
    st.booleans(),
    st.none() | st.dictionaries(st.text(max_size=9), _KEPT | st.text(max_size=9), max_size=3),
)
@settings(max_examples=40)
def test_a_sample_comes_back_from_its_members_exactly(
    caption: str, url: str, count: int | None, everything: bool, extra: dict | None
):
    regions = None if count is None else seeded_regions(count, count, everything=everything)
    sample = dataclasses.replace(seeded_sample(1, regions), caption=caption, url=url, extra=extra)
    members = to_members(sample)
    assert list(members) == (["jpg", "json"] if count is None else ["jpg", "json", "mp"])
    assert members["jpg"] == sample.image
    assert as_dict(from_members(sample.key, members)) == as_dict(sample)


@pytest.mark.parametrize(
    "changes", [{"boxes": np.zeros((2, 4))}, {"attributes": np.zeros((2, 1), np.int32)}, {"scores": None}]
)
def test_arrays_of_another_dtype_or_shape_are_refused(changes):
    with pytest.raises(ValueError, match=f"Regions.{next(iter(changes))} is"):
        dataclasses.replace(seeded_regions(1, 2), **changes)


@pytest.mark.parametrize("background", [0, 2, 5])
def test_background_first_reorders_columns_and_labels_alike(background):
    labels = np.delete(np.arange(6, dtype=np.int32), background)
    regions = dataclasses.replace(seeded_regions(1, 5), background=background, labels=labels)
    probs = regions.class_probs_background_first()
    assert (probs.dtype, regions.num_classes) == (np.float32, 5)
    assert np.array_equal(probs, regions.class_probs[:, [background, *labels]])
    assert regions.labels_background_first().tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="have no class_probs"):
        dataclasses.replace(regions, class_probs=None).class_probs_background_first()


def whole() -> Sample:
    return seeded_sample(1, seeded_regions(1, 3, everything=True))


def number(name: str, place: tuple[int, ...], value: float) -> Callable[[Sample], Sample]:
    """One number of an array of the regions is another."""

    def change(sample: Sample) -> Sample:
        array = getattr(sample.regions, name).copy()
        array[place] = value
        return dataclasses.replace(sample, regions=dataclasses.replace(sample.regions, **{name: array}))

    return change


def size_in_header(width: int, height: int) -> bytes:
    """The JPEG, which says that it has another size."""
    at = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + JPEG[at + 4 :]


# Of the members: what is wrong with them, and the field that must be named.
CORRUPT = {
    "no jpg": (lambda members: {"json": members["json"]}, r"there is no \.jpg member"),
    "json of another version": (metadata(version=2), "has version 2, but this code reads 1"),
    "an unknown array": (packed(masks=["<f4", [0], b""]), r"unknown arrays \['masks'\]"),
    "scores of another byte order": (packed(scores=[">f4", [3], bytes(12)]), r"regions.scores .* '>f4'"),
    "caption as a number": (metadata(caption=3), "caption"),
    "an unknown field": (metadata(width_=1), "width_"),
    "extra of a list": (metadata(extra={"NSFW": [1]}), "extra has 'NSFW'"),
    "jpg ends in its size": (member("jpg", JPEG[: JPEG.index(b"\xff\xc0") + 7]), r"\.jpg"),
    "jpg of another size": (member("jpg", size_in_header(17, 8)), "width"),
    "a bomb": (
        lambda members: metadata(width=60000, height=60000)(members) | {"jpg": size_in_header(60000, 60000)},
        f"width.*{MAX_PIXELS}",
    ),
    "mp of another type": (member("mp", msgpack.packb([1])), r"\.mp"),
    "mp nested deep": (member("mp", b"\x91" * 10**5), r"\.mp"),
    "mp with an ext": (packed(detector=msgpack.ExtType(5, b"x")), r"\.mp"),
    "regions of another version": (packed(version=2), "version"),
    "background negative": (packed(background=-1), "background"),
    "boxes of another dtype": (packed(boxes=["<f8", [3, 4], bytes(96)]), "boxes"),
    "boxes cut short": (packed(boxes=["<f4", [3, 4], bytes(47)]), "boxes"),
    "boxes of a shape that overflows": (packed(boxes=["<f4", [2**62, 4], bytes(48)]), "boxes"),
    "attributes alone": (packed(attribute_scores=...), "attribute_scores"),
}
# Of the numbers: what no reader takes, and no writer writes.
WRONG = {
    "a box of 1e30": (number("boxes", (1, 2), 1e30), r"boxes\[1\]"),
    "a box right of the image": (number("boxes", (1, 2), 16.01), r"boxes\[1\]"),
    "a box without width": (number("boxes", (1, slice(None)), [3, 1, 3, 2]), r"boxes\[1\]"),
    "a label out of class_probs": (number("labels", (2,), 6), r"labels\[2\]"),
    "a label of the background": (number("labels", (1,), 5), r"labels\[1\]"),
    "a score over 1": (number("scores", (1,), 1.001), r"scores\[1\]"),
    "a class_prob that is no number": (number("class_probs", (1, 4), np.nan), r"class_probs\[1, 4\]"),
    "a negative attribute": (number("attributes", (2,), -1), r"attributes\[2\]"),
    "an infinite feature": (number("features", (0, 2), np.inf), r"features\[0, 2\]"),
}


@pytest.mark.parametrize(("change", "named"), CORRUPT.values(), ids=CORRUPT)
def test_invalid_members_are_refused(change, named):
    members = change(to_members(whole()))
    with pytest.raises(BadSample, match=rf"^sample k: .*{named}") as refused:
        from_members("k", members)
    assert refused.value.key == "k"
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("change", "named"), WRONG.values(), ids=WRONG)
def test_wrong_numbers_are_neither_read_nor_written(change, named):
    sample = change(whole())
    for refuse in (check_sample, to_members):
        with pytest.raises(BadSample, match=rf"^sample {sample.key}: regions\.{named}"):
            refuse(sample)
    members = to_members(whole()) | {"mp": pack_regions(sample.regions)}
    with pytest.raises(BadSample, match=rf"^sample k: regions\.{named}"):
        from_members("k", members)


def test_numbers_at_their_limits_are_valid():
    sample = whole()
    boxes = np.float32([[0, 0, 16, 8], [-0.0, 7.99, 1e-30, 8], [15.99, 0, 16, 1e-30]])
    extreme = np.float16([[0, 65504, -65504]] * 3)
    regions = dataclasses.replace(
        sample.regions,
        boxes=boxes,
        scores=np.float32([1, 0, 1e-40]),
        labels=np.int32([0, 4, 4]),
        class_probs=np.float16([[1, 0, 0, 0, 6e-8, 1]] * 3),
        attribute_scores=np.float32([1, 0, 1]),
        features=extreme,
    )
    sample = dataclasses.replace(sample, regions=regions)
    assert as_dict(from_members(sample.key, to_members(sample))) == as_dict(sample)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"exif": b"Exif\0\0" + b"\xff\xc0\0\x11" * 99}])
def test_the_size_of_a_jpeg_is_that_of_its_frame_header(mode, options):
    stream = io.BytesIO()
    Image.new(mode, (300, 7)).save(stream, "JPEG", **options)
    assert jpeg_size(stream.getvalue()) == (300, 7)
    stray = stream.getvalue().replace(b"\xff\xdb", b"\0\xff\0\xff\xff\xdb", 1)  # libjpeg passes over these
    assert Image.open(io.BytesIO(stray)).size == jpeg_size(stray) == (300, 7)


@st.composite
def damaged(draw: st.DrawFn) -> Members:
    """Members of a valid sample; in one of them bytes are replaced, cut out or put in."""
    members = to_members(seeded_sample(2, seeded_regions(2, draw(st.integers(0, 4)), everything=draw(st.booleans()))))
    name = draw(st.sampled_from(sorted(members)))
    data = bytearray(members[name])
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        end = start + draw(st.sampled_from([0, 1, 8, len(data)]))
        data[start:end] = draw(st.binary(max_size=8))
    return members | {name: bytes(data)}


@given(damaged())
@settings(max_examples=200)
def test_damaged_members_are_a_valid_sample_or_refused(members):
    try:
        sample = from_members("k", members)
    except BadSample as error:
        message = str(error)
        assert message.startswith("sample k: ")
        assert message.isprintable()
        return
    assert as_dict(from_members("k", to_members(sample))) == as_dict(sample)


def test_a_bad_sample_survives_pickling_between_processes():
    bad = pickle.loads(pickle.dumps(BadSample("sample k: caption is 3", "k")))
    assert (str(bad), bad.key) == ("sample k: caption is 3", "k")
