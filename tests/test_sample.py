"""A Sample survives its form as tar members to the last bit, and what is no Sample is refused by name."""

import dataclasses
import hashlib
import io
import json

import msgpack
import numpy as np
import pytest
from PIL import Image
from seeded import JPEG, as_dict, seeded_regions, seeded_sample

from storage.sample import Regions, from_members, pack_regions, sample_key, to_members, unpack_regions


def few(**changes) -> Regions:
    """Two regions of three classes whose background is column 2."""
    fields = {
        "boxes": np.float32([[0, 0, 1, 1], [1, 2, 3, 4]]),
        "scores": np.float32([0.5, 0.25]),
        "labels": np.int32([0, 3]),
        "detector": "d",
        "background": 2,
        "class_probs": np.float16([[0.5, 0.25, 0.125, 0], [0, 0.25, 0.5, 0.125]]),
    }
    return Regions(**{**fields, **changes})


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("everything", [False, True])
def test_a_sample_comes_back_from_its_members_exactly(count, everything):
    sample = seeded_sample(count + 1, seeded_regions(count, count, everything=everything))
    members = to_members(sample)
    assert list(members) == ["jpg", "json", "mp"]
    assert as_dict(from_members(sample.key, members)) == as_dict(sample)


def test_a_sample_without_regions_has_two_members_and_comes_back():
    sample = seeded_sample(5)
    members = to_members(sample)
    assert list(members) == ["jpg", "json"]
    assert members["jpg"] == sample.image
    assert as_dict(from_members(sample.key, members)) == as_dict(sample)


def test_the_seeded_picture_is_a_real_jpeg():
    image = Image.open(io.BytesIO(JPEG))
    image.load()
    assert (image.size, image.mode) == ((16, 8), "L")


def test_arrays_that_are_strided_views_are_stored_in_order():
    wide = np.arange(24, dtype=np.float32).reshape(3, 8)
    regions = Regions(wide[:, ::2], wide[:, 1], np.int32([1, 2, 3]), "d")
    back = unpack_regions(pack_regions(regions))
    assert back.boxes.tolist() == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert back.scores.tolist() == [1, 9, 17]


def test_arrays_of_an_unpacked_sample_cannot_be_written_by_accident():
    back = unpack_regions(pack_regions(few()))
    with pytest.raises(ValueError, match="read-only"):
        back.boxes[0, 0] = 1


@pytest.mark.parametrize(
    "changes",
    [
        {"boxes": np.zeros((2, 4))},
        {"boxes": np.zeros((2, 5), np.float32)},
        {"boxes": np.zeros((2, 4), ">f4")},
        {"scores": np.zeros(3, np.float32)},
        {"labels": np.zeros(2, np.int64)},
        {"class_probs": np.zeros((3, 4), np.float16)},
        {"class_probs": np.zeros(2, np.float16)},
        {"features": np.zeros((2, 4), np.float32)},
        {"attributes": np.zeros((2, 1), np.int32)},
        {"scores": None},
    ],
)
def test_an_array_of_another_dtype_or_shape_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=f"Regions.{next(iter(changes))} is"):
        few(**changes)


def test_background_first_reorders_columns_and_labels_alike():
    regions = few()
    probs = regions.class_probs_background_first()
    assert probs.dtype == np.float32
    assert probs.tolist() == [[0.125, 0.5, 0.25, 0], [0.5, 0, 0.25, 0.125]]
    assert regions.labels_background_first().tolist() == [1, 3]
    for own, first in zip(regions.labels, regions.labels_background_first(), strict=True):
        assert np.array_equal(regions.class_probs[:, own], probs[:, first])
    assert regions.num_classes == 3


def test_num_classes_of_regions_without_a_distribution_names_the_detector():
    with pytest.raises(ValueError, match="detector d carry no class_probs"):
        few(class_probs=None).num_classes  # noqa: B018


def test_take_selects_every_array_in_the_order_asked_for():
    regions = seeded_regions(3, 5, everything=True)
    taken = regions.take(np.array([4, 0]))
    for field in dataclasses.fields(Regions):
        before, after = getattr(regions, field.name), getattr(taken, field.name)
        if isinstance(before, np.ndarray):
            assert np.array_equal(after, before[[4, 0]]), field.name
        else:
            assert after == before
    assert len(regions.take(np.zeros(5, bool))) == 0


def test_the_key_is_the_documented_hash_of_url_and_caption():
    expected = hashlib.sha256("http://h/é.jpg\0a café".encode()).hexdigest()[:20]
    assert sample_key("http://h/é.jpg", "a café") == expected
    assert sample_key("a", "bc") != sample_key("ab", "c")


@pytest.mark.parametrize("missing", ["jpg", "json"])
def test_a_missing_member_is_named(missing):
    members = to_members(seeded_sample(1))
    del members[missing]
    with pytest.raises(ValueError, match=rf"sample k has no \.{missing} member"):
        from_members("k", members)


def test_another_version_is_refused():
    members = to_members(seeded_sample(1, seeded_regions(1, 2)))
    about = json.loads(members["json"])
    with pytest.raises(ValueError, match="of version 2, this code reads 1"):
        from_members("k", {**members, "json": json.dumps({**about, "version": 2}).encode()})
    packed = msgpack.unpackb(members["mp"])
    with pytest.raises(ValueError, match="of version 2, this code reads 1"):
        unpack_regions(msgpack.packb({**packed, "version": 2}))


def test_an_array_of_a_later_format_or_of_another_dtype_is_refused():
    packed = msgpack.unpackb(pack_regions(few()))
    with pytest.raises(ValueError, match=r"unknown arrays \['masks'\]"):
        unpack_regions(msgpack.packb({**packed, "masks": ["<f4", [0], b""]}))
    with pytest.raises(ValueError, match="regions.scores is stored as >f4"):
        unpack_regions(msgpack.packb({**packed, "scores": [">f4", [2], bytes(8)]}))
    with pytest.raises(ValueError, match="reshape"):
        unpack_regions(msgpack.packb({**packed, "scores": ["<f4", [2], bytes(12)]}))
