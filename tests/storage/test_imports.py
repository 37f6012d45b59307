"""Tars of others, written here by hand, become shards or are refused."""

import functools
import gzip
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import foreign
import members
import pytest
from PIL import Image
from web import draw, encode

from storage.catalog import Catalog
from storage.collect.plan import CollectSettings
from storage.collect.run import Group, OnCommit, collect, collect_group
from storage.object_store import open_store
from storage.sample import Sample, sample_key

IMAGES = "images"
Members = list[tuple[str, bytes]]


def image_bytes(number: int) -> bytes:
    return encode(draw(seed=number))


# As webdataset: a header of its own for the fraction of the time.
tar_of = functools.partial(members.tar_of, format=tarfile.PAX_FORMAT, mtime=1702599999.5)


def without_end(tar: bytes) -> bytes:
    """Cut behind the last member: tarfile takes that for a whole tar."""
    return tar[: -(-len(tar.rstrip(b"\0")) // 512) * 512]


def with_text(key: str, number: int, text: bytes = b"", *between: tuple[str, bytes]) -> Members:
    """As cc3m-wds has it."""
    return [
        (f"{key}.jpg", image_bytes(number)), *between, (f"{key}.txt", text or f"caption {number}: a café\n".encode())
    ]  # fmt: skip


def with_json(key: str, number: int, extension: str = "png", **fields: object) -> Members:
    image = image_bytes(number) if extension == "jpg" else encode(draw(seed=number), extension)
    fields = {"caption": f"caption {number}: a café", "url": f"http://example.test/{number}", "width": 96} | fields
    return [(f"{key}.{extension}", image), (f"{key}.json", json.dumps(fields).encode())]


def with_both(key: str, number: int) -> Members:
    """As img2dataset writes it; the members that follow are of no use here."""
    image, text = with_json(key, number, "webp", caption="another"), with_text(key, number)[1:]
    return [*image, *text, (f"{key}.cls", b"7"), (f"{key}.mask.png", b"?")]


def put_tars(root: str, **tars: bytes) -> str:
    store = open_store(root)
    for name, data in tars.items():
        store.put(name if name.endswith(".gz") else f"{name}.tar", data)
    return root


def of_tars(root: Path | str, tars: str, **changes: object) -> list[tuple]:
    """Collect; (row, status, detail, url) of every row."""
    settings = CollectSettings("imported", webdataset=tars, **({"rows_per_shard": 2} | changes))
    collect(str(root), settings, lambda line: None)
    tables = Catalog(open_store(str(root)), "imported").columns(IMAGES, ["row", "status", "detail", "url"])
    return [line for table in tables for line in zip(*table.to_pydict().values(), strict=True)]


def samples_in(root: Path) -> list[Sample]:
    catalog = Catalog(open_store(str(root)), "imported")
    return [sample for shard in catalog.shards(IMAGES) for sample in catalog.read(IMAGES, shard)]


@pytest.mark.parametrize(
    ("members", "url"), [(with_text, "train/a.tar/000{}.jpg"), (with_both, "http://example.test/{}")]
)
def test_tars_of_each_kind_are_imported_and_an_import_goes_on(members: Callable, url: str, root: str, tmp_path: Path):
    first, second = ([one for n in numbers for one in members(f"000{n}", n)] for numbers in (range(3), (3, 0)))
    put_tars(root, **{"train/a": tar_of(first), "train/b": tar_of(second, format=tarfile.GNU_FORMAT)})
    rows = of_tars(tmp_path / "imported", root)
    assert [status for _, status, *_ in rows] == ["ok"] * 4 + ["duplicate" if url.startswith("http") else "ok"]
    found = samples_in(tmp_path / "imported")[:4]
    assert [one.caption for one in found] == [f"caption {n}: a café" for n in range(4)]
    assert [one.url for one in found[:3]] == [url.format(n) for n in range(3)]
    assert [one.key for one in found] == [sample_key(one.url, one.caption) for one in found]
    jpegs = [data for name, data in first if name.endswith("jpg")]
    assert not jpegs or [one.image for one in found[:3]] == jpegs
    catalog = Catalog(open_store(str(tmp_path / "imported")), "imported")
    before = [header.tar_sha256 for header in catalog.headers(IMAGES).values()]
    catalog.store.delete("imported/images/00001.parquet")  # from the end of one tar into the next
    assert of_tars(tmp_path / "imported", root) == rows
    put_tars(root, **{"train/c": tar_of(members("9", 9))})
    assert of_tars(tmp_path / "imported", root, rows_per_shard=3)[:5] == rows  # what is committed keeps its rows
    assert [header.tar_sha256 for header in catalog.headers(IMAGES).values()][: len(before)] == before


def test_what_has_no_pair_is_a_row_with_a_status(tmp_path: Path):
    found = [
        *with_text("good", 0, b"", ("._good.jpg", b"\0")),  # as macOS adds them
        ("no-text.jpg", image_bytes(1)),
        ("no-image.txt", b"a caption"),
        *with_text("latin", 2, "café".encode("latin-1")),
        *with_text("long", 3, b"a" * (2**20 + 1)),
        ("torn.jpg", image_bytes(4)[:500]),
        ("torn.txt", b"a caption"),
        *with_text("several", 5, b"\xef\xbb\xbfa caption\r\n", ("several.png", encode(draw(seed=7), "PNG"))),
        *with_text("brace", 6, b"a caption", ("brace.json", b"{")),  # with what would be its URL
        ("nan.jpg", image_bytes(9)),
        ("nan.json", b'{"url": "http://x/", "caption": "a caption", "similarity": NaN, "license": "CC0"}'),
        ("drawn.svg", b"<svg/>"),
        *with_text("drawn", 8)[1:],
        ("scan.tiff", b"II*"),
        ("scan.txt", b"a caption"),
        ("link.txt", b"a caption"),
        ("README", b"of nobody"),
    ]
    rows = of_tars(tmp_path / "root", put_tars(str(tmp_path / "tars"), a=tar_of(found)))
    assert [(row, status) for row, status, *_ in rows] == [*enumerate([
        "ok", "bad_caption", "missing_file", "bad_caption", "bad_caption", "truncated", "ok", "bad_caption", "ok",
        "not_image", "not_image", "missing_file",
    ])]  # fmt: skip
    assert [re.split("[;,:] ?", detail)[:2] for _, _, detail, _ in rows if detail and "JPEG" not in detail] == [
        ["no-text of a.tar", "no caption"],
        ["a.tar has no image no-image"],
        ["latin of a.tar", "'utf-8' codec can't decode byte 0xe9 in position 3"],
        ["long of a.tar", ".txt has 1048577 bytes"],
        ["brace of a.tar", ".json is truncated or not JSON"],
        ["it is SVG", "which is not decoded here"],
        ["a.tar has no image link"],
    ]
    good, several, nan = samples_in(tmp_path / "root")
    assert good.image == image_bytes(0)
    assert (several.caption, several.image) == ("a caption", image_bytes(5))
    assert (nan.url, nan.extra) == ("http://x/", {"license": "CC0"})


HIDDEN = b"Mac OS X resource fork"
LINES = b"a dog\r\n\na cat\n a bird\n"


@pytest.mark.parametrize(
    ("found", "expected"),
    [  # members, and the image and the caption of each row
        (  # members without a key end no sample, whatever stands before their name
            [
                ("train/._a.jpg", HIDDEN), ("train/a.jpg", image_bytes(0)), ("train/._a.txt", HIDDEN),
                ("__MACOSX/train/._a.txt", HIDDEN), ("train/README", HIDDEN), (".git/a.json", HIDDEN),
                ("__MACOSX/a.txt", HIDDEN), ("train/.DS_Store", HIDDEN), ("train/a.txt", b"one"),
            ],
            [("train/a.jpg", "one")],
        ),
        ([("./..a/b.jpg", image_bytes(0)), ("./..a/b.txt", b"one")], []),
        ([*with_text("../up/a", 0, b"one"), *with_text("./b", 1, b"2")], [("../up/a.jpg", "one"), ("./b.jpg", "2")]),
        (  # names with dots
            [*with_text("22.00", 0, b"zero"), *with_text("22.01", 1, b"one"), *with_text("v1.2/x.y.z", 2, b"two")],
            [("22.00.jpg", "zero"), ("22.01.jpg", "one"), ("v1.2/x.y.z.jpg", "two")],
        ),
        (  # beside one without; a mask has no text
            [*with_text("22", 0, b"zero"), *with_text("22.01", 1, b"one"), ("22.mask.png", b"?"), ("22.a.json", b"{}")],
            [("22.jpg", "zero"), ("22.01.jpg", "one")],
        ),
        (
            [("5.0.jpg", image_bytes(0)), ("5.1.jpg", image_bytes(1)), ("5.json", b"{}")],
            [("5.0.jpg", None), ("5.1.jpg", None)],
        ),
        (with_text("a", 0, LINES), [("a.jpg", "a dog"), ("a.jpg", "a cat"), ("a.jpg", " a bird")]),
        (with_text("a", 0, b'["a dog", "a cat"]'), [("a.jpg", "a dog"), ("a.jpg", "a cat")]),
        (with_text("a", 0, b"['a dog', \"a cat's\"]"), [("a.jpg", None)]),
        (with_text("a", 0, b"['a dog' 'a cat']"), [("a.jpg", None)]),
        (with_text("a", 0, b"[a dog] ['a cat"), [("a.jpg", "[a dog] ['a cat")]),
        (with_json("a", 0, url=None, caption=["a dog", "a cat"]), [("a.png", "a dog"), ("a.png", "a cat")]),
        (with_json("a", 0, url=float("nan"), caption=float("nan")), [("a.png", None)]),
        (with_text("a", 0, b" \n\n"), [("a.jpg", "")]),
        # As img2dataset writes one caption with line ends.
        ([*with_json("a", 0, url=None, caption="a\nb"), ("a.txt", b"a\nb")], [("a.png", "a\nb")]),
    ],
)  # fmt: skip
def test_each_image_of_a_tar_has_a_row_for_each_of_its_captions(
    found: Members, expected: list[tuple[str, str | None]], tmp_path: Path
):
    """The caption None stands for the status bad_caption, "" for empty_caption."""
    if not expected:
        with pytest.raises(ValueError, match="has no rows"):
            of_tars(tmp_path / "root", put_tars(str(tmp_path / "tars"), a=tar_of(found)))
        return
    extra = with_text("zzz", 9, b"the last")
    rows = of_tars(tmp_path / "root", put_tars(str(tmp_path / "tars"), a=tar_of([*found, *extra])))
    statuses = [{None: "bad_caption", "": "empty_caption"}.get(caption, "ok") for _, caption in expected]
    assert [status for _, status, *_ in rows] == [*statuses, "ok"]
    assert [url for *_, url in rows] == [f"a.tar/{name}" for name, _ in expected] + ["a.tar/zzz.jpg"]
    captions = [caption for _, caption in expected if caption]
    assert [sample.caption for sample in samples_in(tmp_path / "root")] == [*captions, "the last"]


def test_fields_of_a_json_are_named_and_kept_on_request(tmp_path: Path):
    members = [one for n in range(3) for one in with_json(f"{n}", n, "jpg", alt=f"alt {n}", score=n / 2)]
    members += [("3.jpg", image_bytes(3)), ("3.json", b"{"), *with_json("4", 4, "jpg", alt=7)]
    members += with_json("5", 5, "jpg", alt="a", score=[1])
    tars = put_tars(str(tmp_path / "tars"), a=tar_of(members))
    rows = of_tars(tmp_path / "root", tars, columns=("url", "alt", "score", "width"))
    assert [status for _, status, *_ in rows] == ["ok"] * 3 + ["bad_caption"] * 3
    for (*_, detail, _), named in zip(rows[3:], ("3 .*JSON", "4 .* 'alt' is 7", r"5 .* 'score' is \[1\]"), strict=True):
        assert re.match(named, detail)
    kept = [(f"alt {n}", {"score": n / 2, "width": 96}) for n in range(3)]
    assert [(one.caption, one.extra) for one in samples_in(tmp_path / "root")] == kept
    with pytest.raises(ValueError, match="the list changed under committed shards: shard 00000"):
        of_tars(tmp_path / "root", tars)


@pytest.mark.parametrize(
    ("tars", "columns", "named"),
    [
        ({}, (), "tars contains no .tar file"),
        ({"a": tar_of(with_text("a", 0)), "b": tar_of(with_text("b", 1))[:-9000]}, (), r"b\.tar .* it is truncated"),
        ({"a": without_end(tar_of(with_text("a", 0)))}, (), r"a\.tar .* ends early"),
        ({"a": gzip.compress(tar_of(with_text("a", 0)), mtime=0)}, (), r"a\.tar is packed with gzip; unpack"),
        ({"a": foreign.LFS}, (), r"a\.tar is a Git LFS pointer"),
        ({"a.tar.gz": b""}, (), r"contains no \.tar file, but a\.tar\.gz: unpack it"),
        ({"a": tar_of([*with_text("a", 0), *with_text("a", 0)])}, (), r"a\.tar .* a\.jpg: duplicate file name"),
        ({"a": tar_of(with_json("a", 0, "jpg"))}, ("url", "alt"), "bad_caption.* a of a.tar: no caption"),
    ],
)
def test_tars_that_cannot_be_imported_are_refused_before(
    tars: dict[str, bytes], columns: tuple[str, ...], named: str, tmp_path: Path
):
    (tmp_path / "tars").mkdir()
    put_tars(str(tmp_path / "tars"), **tars)
    with pytest.raises(ValueError, match=named):
        of_tars(tmp_path / "root", str(tmp_path / "tars"), columns=columns)
    assert not Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES)


@pytest.mark.parametrize("member", [0, 4])
def test_a_tar_with_a_damaged_header_and_one_that_changed_are_refused(member: int, tmp_path: Path):
    data = bytearray(tar_of([one for n in range(4) for one in with_text(f"{n}", n)], format=tarfile.USTAR_FORMAT))
    tars = put_tars(str(tmp_path / "tars"), a=bytes(data))
    of_tars(tmp_path / "root", tars)
    with tarfile.open(fileobj=BytesIO(bytes(data))) as members:
        offset = members.getmembers()[member].offset
    data[offset + 100 : offset + 200] = b"x" * 100
    put_tars(tars, a=bytes(data))
    with pytest.raises(ValueError, match=r"a\.tar cannot be read: it is (damaged|truncated)"):
        of_tars(tmp_path / "root", tars)
    put_tars(tars, a=tar_of([one for n in range(1, 5) for one in with_text(f"{n}", n)]))
    with pytest.raises(ValueError, match="the list changed under committed shards: shard 00000"):
        of_tars(tmp_path / "root", tars)


def test_tars_that_change_while_they_are_imported_are_an_error(tmp_path: Path):
    tars = put_tars(str(tmp_path / "tars"), a=tar_of([one for n in range(4) for one in with_text(f"{n}", n)]))

    def change(at: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        counts = collect_group(at, settings, group, on_commit)
        put_tars(tars, a=tar_of([one for n in range(4) for one in with_text(f"{n}", 9 - n)]))
        return counts

    settings = CollectSettings("imported", webdataset=tars, rows_per_shard=2, shards_per_task=1)
    with pytest.raises(ValueError, match="tars was changed while it was collected. Shard 00001 was not committed"):
        collect(str(tmp_path / "root"), settings, lambda line: None, change)
    assert Catalog(open_store(str(tmp_path / "root")), "imported").shards(IMAGES) == ["00000"]


LIMITED = """
import resource, sys
from storage.collect.run import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20,) * 2)
main(sys.argv[1:])
"""


def test_a_lack_of_memory_stops_an_import_with_one_line(tmp_path: Path):
    """Each of eight images takes 143 MB, and there are 600 MiB left."""
    image = encode(Image.new("RGB", (8000, 6000)), "PNG", compress_level=1)
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(image)
    lines = [f"a thing\t{number}.png\n" for number in range(8)]
    (tmp_path / "list.tsv").write_text("".join(lines))
    arguments = ["root", "big", "--captions=list.tsv", f"--images={tmp_path}", "--download.decode_threads=8"]
    command = [sys.executable, "-c", LIMITED, *arguments]
    program = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (program.returncode, program.stderr.count("\n")) == (1, 1), program.stderr
    assert str(tmp_path) in program.stderr
    assert "raise `ulimit -v`" in program.stderr
