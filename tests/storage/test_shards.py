"""storage.shards: deterministic WebDataset tars, read by webdataset and by span."""

import dataclasses
import tarfile
from pathlib import Path

import pytest
from members import tar_of
from seeded import as_dict, seeded_regions, seeded_sample

from storage.sample import Sample, to_members
from storage.shards import Span, read_samples, read_span, write_shard


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Not in the order of their keys, with and without regions, images of many lengths."""
    return [seeded_sample(i * 97, seeded_regions(i, i % 4) if i % 3 else None) for i in range(12)]


@pytest.fixture(scope="module")
def shard(samples, tmp_path_factory) -> tuple[Path, list[Span]]:
    file = tmp_path_factory.mktemp("shards") / "00000.tar"
    return file, write_shard(samples, file)


LONG = "d" * 80 + "/" + "k" * 60 + ".jpg"


def members_of(sample: Sample) -> list[tuple[str, bytes]]:
    return [(f"{sample.key}.{extension}", data) for extension, data in to_members(sample).items()]


def test_a_shard_is_read_alike_whole_by_spans_and_by_webdataset(samples, shard):
    import webdataset

    (file, spans), keys, expected = shard, [sample.key for sample in samples], [as_dict(sample) for sample in samples]
    data = file.read_bytes()
    assert keys != sorted(keys)
    assert [as_dict(sample) for sample in read_samples(data, spans, str(file))] == expected
    assert [span.key for span in spans] == keys
    assert [span.offset for span in spans] == [0, *(span.offset + span.length for span in spans[:-1])]
    assert [as_dict(read_span(data[span.offset : span.offset + span.length])) for span in spans] == expected
    read = list(webdataset.WebDataset(str(file), shardshuffle=False))
    assert [record["__key__"] for record in read] == keys
    for record, sample in zip(read, samples, strict=True):
        assert {name: data for name, data in record.items() if not name.startswith("__")} == to_members(sample)


def test_a_shifted_span_is_refused(shard):
    file, spans = shard
    data = file.read_bytes()
    one, two = spans[3], spans[4]
    begin, end = one.offset, one.offset + one.length
    for start, stop, message in [
        (begin + 512, end, "no tar header at byte 0"),
        (begin, end - 512, "is truncated"),
        (begin, two.offset + two.length, "hold 2 samples"),
        (begin, begin, "0 bytes hold 0 samples"),
        (spans[-1].offset, len(data), "zeros at byte"),
    ]:
        with pytest.raises(ValueError, match=f"^it.*{message}"):
            read_span(data[start:stop], "it")


@pytest.mark.parametrize("size", [b"-0000001000\0", b"0_000000274\0", b"           \0"])
def test_a_size_that_is_no_octal_number_is_refused(shard, size):
    file, spans = shard
    data = bytearray(file.read_bytes()[: spans[0].length])
    data[124:136] = size
    checksum = sum(data[:512]) - sum(data[148:156]) + 8 * 32
    data[148:156] = b"%06o\0 " % checksum  # which holds: whoever wrote this meant it
    with pytest.raises(ValueError, match="^mine: no tar header at byte 0; "):
        read_span(bytes(data), "mine")


ONE, TWO = members_of(seeded_sample(1, seeded_regions(1, 2))), members_of(seeded_sample(2))
KEY = seeded_sample(1).key


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tar_of([("README", b"hello")]), "'README' at byte 0 belongs to no sample"),
        (tar_of([("folder/key.jpg", b"hello")]), "'folder/key.jpg' at byte 0 belongs to no sample"),
        (tar_of([("other.json", b"{}")]), r"sample other: there is no \.jpg member"),
        (tar_of(ONE + TWO + ONE), rf"member {KEY}\.jpg at byte \d+ occurs twice"),
        (tar_of(ONE + ONE), rf"member {KEY}\.jpg at byte \d+ occurs twice"),
        (tar_of([("key.jpg", b"")], type=tarfile.SYMTYPE, linkname="elsewhere"), r"'key\.jpg' at byte 0 is not a file"),
        (tar_of([(LONG, b"x")], tarfile.GNU_FORMAT), "is not a file"),
        (tar_of([ONE[0], (f"{KEY}.json", b"{")]), rf"sample {KEY}: the \.json member"),
    ],
)
def test_members_that_are_no_sample_are_refused(data, message):
    content = data.rstrip(b"\0")
    span = content + bytes(-len(content) % 512)  # without the zeros at the end of a tar
    with pytest.raises(ValueError, match=f"theirs: .*({message})"):
        read_span(span, "theirs")


@pytest.mark.parametrize("key", ["", "a.b", "../a", "é", "k" * 200, seeded_sample(1).key])
def test_a_key_that_is_invalid_or_occurs_twice_is_refused(key, tmp_path):
    with pytest.raises(ValueError, match="key|name"):
        write_shard([seeded_sample(1), dataclasses.replace(seeded_sample(2), key=key)], tmp_path / "a.tar")
