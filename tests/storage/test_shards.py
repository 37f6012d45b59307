"""A shard is a WebDataset tar, the same bytes for the same samples, readable whole, by webdataset and by span."""

import dataclasses
import io
import tarfile
import time
from pathlib import Path

import pytest
from seeded import as_dict, seeded_regions, seeded_sample

from storage.sample import BadSample, Sample, to_members
from storage.shards import Span, index_shard, read_shard, read_span, write_shard


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Not in the order of their keys, with and without regions, images of many lengths."""
    return [seeded_sample(i * 97, seeded_regions(i, i % 4) if i % 3 else None) for i in range(12)]


@pytest.fixture(scope="module")
def shard(samples, tmp_path_factory) -> tuple[Path, list[Span]]:
    file = tmp_path_factory.mktemp("shards") / "00000.tar"
    return file, write_shard(samples, file)


def tar_of(members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, **fields) -> bytes:
    """A tar that other software wrote."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def members_of(sample: Sample) -> list[tuple[str, bytes]]:
    return [(f"{sample.key}.{extension}", data) for extension, data in to_members(sample).items()]


def test_a_shard_gives_back_its_samples_in_order(samples, shard):
    file, _ = shard
    expected = [as_dict(sample) for sample in samples]
    assert [sample["key"] for sample in expected] != sorted(sample["key"] for sample in expected)
    assert [as_dict(sample) for sample in read_shard(file)] == expected
    assert [as_dict(sample) for sample in read_shard(file.read_bytes())] == expected


def test_webdataset_reads_the_same_members(samples, shard):
    import webdataset

    file, _ = shard
    read = list(webdataset.WebDataset(str(file), shardshuffle=False))
    assert [record["__key__"] for record in read] == [sample.key for sample in samples]
    for record, sample in zip(read, samples, strict=True):
        assert {name: data for name, data in record.items() if not name.startswith("__")} == to_members(sample)


def test_the_same_samples_give_the_same_bytes_and_nothing_of_the_machine(samples, shard, tmp_path):
    file, spans = shard
    time.sleep(1.1 - time.time() % 1)  # into another second, for a clock in the headers
    assert write_shard(iter(samples), tmp_path / "other.tar") == spans
    assert (tmp_path / "other.tar").read_bytes() == file.read_bytes()
    with tarfile.open(file, "r:") as tar:
        for info in tar:
            assert (info.mtime, info.mode, info.uid, info.gid, info.uname, info.gname) == (0, 0o644, 0, 0, "", "")
            assert (info.type, info.pax_headers) == (tarfile.REGTYPE, {})


def test_a_span_is_exactly_one_sample(samples, shard):
    file, spans = shard
    data = file.read_bytes()
    assert [span.key for span in spans] == [sample.key for sample in samples]
    assert spans[0].offset == 0
    for span, following in zip(spans, spans[1:], strict=False):
        assert span.offset + span.length == following.offset
    for span, sample in zip(spans, samples, strict=True):
        assert as_dict(read_span(data[span.offset : span.offset + span.length])) == as_dict(sample)


def test_a_span_that_is_off_is_refused(shard):
    file, spans = shard
    data = file.read_bytes()
    one, two = spans[3], spans[4]
    begin, end = one.offset, one.offset + one.length
    for start, stop, message in [
        (begin + 512, end, "no tar header at byte 0"),
        (begin + 1, end, "no tar header at byte 0"),
        (begin, end - 512, "is torn"),
        (begin, end - 1, "is torn"),
        (begin, two.offset + two.length, "hold 2 samples"),
        (begin, begin, "0 bytes hold 0 samples"),
        (spans[-1].offset, len(data), "zeros at byte"),
    ]:
        with pytest.raises(ValueError, match=f"^it.*{message}"):
            read_span(data[start:stop], "it")


def test_the_index_of_a_shard_can_be_rebuilt(shard):
    file, spans = shard
    assert index_shard(file) == spans


@pytest.mark.parametrize("writer", ["webdataset", "pax", "gnu"])
def test_a_tar_that_others_wrote_in_this_layout_is_indexed_and_read(samples, tmp_path, writer):
    file = tmp_path / "theirs.tar"
    if writer == "webdataset":  # its default: a fractional mtime, for which it writes an extended header a member
        import webdataset

        with webdataset.TarWriter(str(file), encoder=False) as out:
            for sample in samples:
                out.write({"__key__": sample.key, **to_members(sample)})
        assert b"mtime=" in file.read_bytes()
    else:
        members = [member for sample in samples for member in members_of(sample)]
        theirs = {"pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}[writer]
        file.write_bytes(tar_of(members, theirs, mtime=1700000000.5, uname="someone"))
    expected = [as_dict(sample) for sample in samples]
    assert [as_dict(sample) for sample in read_shard(file)] == expected
    data = file.read_bytes()
    spans = index_shard(file)
    assert [span.offset for span in spans] == [0, *(span.offset + span.length for span in spans[:-1])]
    assert [as_dict(read_span(data[span.offset : span.offset + span.length])) for span in spans] == expected


def test_a_tar_torn_anywhere_is_refused_by_name(shard, tmp_path):
    file, spans = shard
    data = file.read_bytes()
    torn = tmp_path / "torn.tar"
    inside = range(0, len(data), 331)
    borders = [span.offset for span in spans] + [spans[-1].offset + spans[-1].length, len(data) - 1, len(data) - 512]
    for length in sorted({*inside, *borders}):
        torn.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"torn\.tar is torn: .* write the shard again"):
            list(read_shard(torn))
        with pytest.raises(ValueError, match=r"torn\.tar is torn"):
            index_shard(torn)


def test_a_tar_torn_at_a_record_and_padded_with_what_follows_is_refused(shard):
    data = shard[0].read_bytes()
    cut = data[: len(data) // 10240 // 2 * 10240]
    with pytest.raises(ValueError, match="torn"):
        list(read_shard(cut))
    junk = data[:-1] + b"x"
    with pytest.raises(ValueError, match="no end of archive"):
        list(read_shard(junk))


def test_a_flipped_bit_in_a_header_is_found_with_its_place(shard):
    file, spans = shard
    for place in (0, 100, 130, 150, 300):
        data = bytearray(file.read_bytes())
        data[spans[2].offset + place] ^= 1
        with pytest.raises(ValueError, match=rf"mine: .*header at byte {spans[2].offset}"):
            list(read_shard(bytes(data), "mine"))


@pytest.mark.parametrize(
    "size", [b"-0000001000\0", b"+0000000274\0", b"0_000000274\0", b"           \0", b"0x000000274\0"]
)
def test_a_size_that_is_no_octal_number_is_refused_at_its_place(shard, size):
    data = bytearray(shard[0].read_bytes())
    data[124:136] = size
    checksum = sum(data[:512]) - sum(data[148:156]) + 8 * 32
    data[148:156] = b"%06o\0 " % checksum  # which holds: whoever wrote this meant it
    with pytest.raises(ValueError, match="^mine: no tar header at byte 0; "):
        list(read_shard(bytes(data), "mine"))


def test_every_message_of_a_span_begins_with_the_name_it_was_given(shard):
    file, spans = shard
    good = file.read_bytes()[spans[1].offset : spans[1].offset + spans[1].length]
    damaged = bytearray(good)
    damaged[good.index(b'{"') + 1] = 0
    name = "s3://bucket/prefix/captions/images/00000-0123456789ab.tar at byte 3072"
    bad = (b"", good[:-512], good[512:], good + good, good + bytes(512), bytes(512) + good, b"x" * 512, bytes(damaged))
    for data in bad:
        with pytest.raises(ValueError) as error:
            read_span(data, name=name)
        assert str(error.value).startswith(name)


def all_of(data: bytes, name: str) -> list[Sample]:
    """The samples of a tar; the error of the first that is none."""
    samples = list(read_shard(data, name))
    for bad in samples:
        if isinstance(bad, BadSample):
            raise bad
    return samples


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("README", b"hello"), "'README' at byte 0 belongs to no sample"),
        (("key.txt", b"hello"), "'key.txt' at byte 0 belongs to no sample"),
        ((".jpg", b"hello"), "'.jpg' at byte 0 belongs to no sample"),
        (("key.seg.jpg", b"hello"), "'key.seg.jpg' at byte 0 belongs to no sample"),
        (("folder/key.jpg", b"hello"), "'folder/key.jpg' at byte 0 belongs to no sample"),
        (("other.json", b"{}"), r"sample other: there is no \.jpg member"),
    ],
)
def test_a_member_of_no_sample_is_refused_by_name(extra, message):
    data = tar_of([extra, *members_of(seeded_sample(1))])
    with pytest.raises(ValueError, match=f"theirs: .*({message})"):
        all_of(data, "theirs")


def test_a_key_or_a_member_that_occurs_twice_is_refused(tmp_path):
    one, two = seeded_sample(1), seeded_sample(2)
    with pytest.raises(ValueError, match=f"key {one.key} occurs twice"):
        write_shard([one, two, one], tmp_path / "a.tar")
    apart = tar_of(members_of(one) + members_of(two) + members_of(one))
    with pytest.raises(ValueError, match=f"theirs: key {one.key} occurs twice, again at byte"):
        list(read_shard(apart, "theirs"))
    together = tar_of(members_of(one) + members_of(one))
    with pytest.raises(ValueError, match=rf"theirs: member {one.key}\.jpg at byte \d+ occurs twice"):
        list(read_shard(together, "theirs"))


def test_a_folder_or_a_link_in_a_tar_is_refused():
    data = tar_of([("key.jpg", b"")], type=tarfile.SYMTYPE, linkname="elsewhere")
    with pytest.raises(ValueError, match=r"'key\.jpg' at byte 0 is no file"):
        list(read_shard(data))


def test_a_name_that_does_not_fit_a_plain_header_is_refused():
    for format in (tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        data = tar_of([("d" * 80 + "/" + "k" * 60 + ".jpg", b"x")], format)
        with pytest.raises(ValueError, match="longer than 100 bytes|does not fit USTAR|is no file"):
            list(read_shard(data))


@pytest.mark.parametrize("key", ["", "a.b", "a/b", "../a", "é", ".hidden", "k" * 200])
def test_a_key_that_cannot_be_a_name_is_refused_and_leaves_no_file(key, tmp_path):
    import dataclasses

    with pytest.raises(ValueError, match="key|name"):
        write_shard([seeded_sample(1), dataclasses.replace(seeded_sample(2), key=key)], tmp_path / "a.tar")
    assert list(tmp_path.iterdir()) == []


def test_samples_that_break_off_leave_no_file(tmp_path):
    def two_then_stop():
        yield seeded_sample(1)
        yield seeded_sample(2)
        raise RuntimeError("the detector died")

    with pytest.raises(RuntimeError, match="the detector died"):
        write_shard(two_then_stop(), tmp_path / "a.tar")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_of_no_samples_is_a_whole_empty_tar(tmp_path):
    assert write_shard([], tmp_path / "a.tar") == []
    assert list(read_shard(tmp_path / "a.tar")) == []
    assert index_shard(tmp_path / "a.tar") == []


def test_contents_that_are_no_sample_are_named_with_their_file():
    members = dict(members_of(seeded_sample(1, seeded_regions(1, 2))))
    key = seeded_sample(1).key
    for name, data in [(f"{key}.json", b"{"), (f"{key}.json", b'{"version": 1}'), (f"{key}.mp", b"\x01")]:
        with pytest.raises(ValueError, match=f"theirs: sample {key}: "):
            all_of(tar_of(list({**members, name: data}.items())), "theirs")


@pytest.mark.parametrize("size", [511, 512, 513, 1024])
def test_a_member_that_fills_its_blocks_exactly_needs_no_padding(size, tmp_path):
    first, second = seeded_sample(1), seeded_sample(2)
    comment = size - len(first.image) - 2  # of a JPEG: its length counts itself, but not the marker
    image = first.image[:2] + b"\xff\xfe" + comment.to_bytes(2, "big") + bytes(comment - 2) + first.image[2:]
    first = dataclasses.replace(first, image=image)
    spans = write_shard([first, second], tmp_path / "00000.tar")
    assert len(image) == size
    assert [sample.image for sample in read_shard(tmp_path / "00000.tar")] == [image, second.image]
    assert index_shard(tmp_path / "00000.tar") == spans
