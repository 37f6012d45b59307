"""A caption list or a folder of images becomes committed shards: without Prefect."""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from captioned import captioned_scenes as captions
from places import PROJECT
from web import Web, draw, encode, in_turn, raw, send, settings_for, silent

from demo.data import DemoData
from demo.serve import free_port
from storage.catalog import Catalog
from storage.collect.fetch import DownloadSettings
from storage.collect.normalise import ImageSettings
from storage.collect.plan import CollectSettings, Part, plan, prepare_rows
from storage.collect.rows import CaptionRow
from storage.collect.run import Group, OnCommit, check_network, collect, collect_group, main
from storage.inventory import Inventory
from storage.object_store import open_store
from storage.verify import verify
from storage.withdrawn import withdraw

IMAGES = "images"


def served(web: Web, file: Path, *lines: str, **changes: object) -> CollectSettings:
    """A list with these lines in shards of two rows; `/name` stands for that page of the server."""
    file.write_text("".join(line.replace("\t/", f"\thttp://{web.host}/") + "\n" for line in lines))
    settings = {"captions": str(file), "download": settings_for(web, deadline=3), "rows_per_shard": 2}
    return CollectSettings("captions", **(settings | changes))


def quietly(root: Path | str, settings: CollectSettings, run_group: Callable | None = None):
    return collect(str(root), settings, lambda line: None, run_group)


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(collected, tmp_path / "root"))


def of(root: str | Path, dataset: str = "captions") -> Catalog:
    return Catalog(open_store(str(root)), dataset)


def column(root: str | Path, name: str, dataset: str = "captions") -> list:
    """A column of all manifests, in order."""
    return [value for table in of(root, dataset).columns(IMAGES, [name]) for value in table[name].to_pylist()]


statuses = functools.partial(column, name="status")


def stored_captions(root: str | Path) -> list[str]:
    return [sample.caption for shard in of(root).shards(IMAGES) for sample in of(root).read(IMAGES, shard)]


def contents(root: str) -> tuple:
    """What the same list must give again; not how often a row was tried before its deadline."""
    tars = {shard: header.tar_sha256 for shard, header in of(root).headers(IMAGES).items()}
    return tars, [table.to_pylist() for table in of(root).columns(IMAGES, ["row", "key", "status"])]


def test_only_the_missing_shards_are_collected_in_groups(demo_data: DemoData, root: str):
    before, groups = contents(root), []
    for shard in ("00000", "00002", "00003"):
        of(root).store.delete(f"captions/images/{shard}.parquet")

    def group(at: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        groups.append([part.shard for part in group.parts])
        return collect_group(at, settings, group, on_commit)

    assert quietly(root, captions(demo_data), group).new_shards == 3
    again = quietly(root, captions(demo_data), group)  # for which there is no group
    assert (again.shards, again.new_shards, again.counts) == (4, 0, of(root).counts(IMAGES))
    assert groups == [["00000", "00002"], ["00003"]]
    assert contents(root) == before
    # A group that is tried again leaves committed shards alone, and counts them.
    of(root).store.delete("captions/images/00003.parquet")
    catalog = of(root)
    rows = prepare_rows(catalog.store, captions(demo_data))
    parts = tuple(plan(captions(demo_data), rows, catalog.headers(IMAGES)))
    counts = collect_group(root, captions(demo_data), Group(parts, rows.id, {}, 32))
    assert counts == of(root).counts(IMAGES)
    assert contents(root) == before


def test_a_list_that_changed_under_committed_shards_is_an_error(demo_data: DemoData, root: str, tmp_path: Path):
    lines = demo_data.train_tsv.read_text().splitlines(keepends=True)
    changed = tmp_path / "changed.tsv"
    for new, what in (
        ([*lines[:15], "another " + lines[15], *lines[16:]], "shard 00001 has rows 10 to 20"),
        (lines[:31], "shard 00003 has rows 30 to 32"),
    ):
        changed.write_text("".join(new))
        with pytest.raises(ValueError, match=what):
            quietly(root, captions(demo_data, changed))
    with pytest.raises(ValueError, match="shard 00000 .* max_side 1024, now 512"):
        quietly(root, captions(demo_data, download=DownloadSettings(max_side=512)))
    changed.write_text("".join(lines))  # under another name it is the same list
    assert quietly(root, captions(demo_data, changed)).new_shards == 0


def test_a_list_may_grow_and_a_repeated_row_is_a_duplicate_of_the_first(web: Web, tmp_path: Path):
    """Also of a row of another shard, and whenever either came."""
    web.put("/twice.jpg", send(encode(draw())))
    lines = [f"caption {i}\t/twice.jpg" for i in (0, 1, 2, 1, 0, 0, 3)]
    file, root, before = tmp_path / "list.tsv", tmp_path / "root", web.count_of("/twice.jpg")
    for rows, rows_per_shard, new_shards in ((5, 3, 2), (5, 2, 0), (7, 1, 2)):
        collected = quietly(root, served(web, file, *lines[:rows], rows_per_shard=rows_per_shard))
        assert collected.new_shards == new_shards
    tables = [table["row"].to_pylist() for table in of(root).columns(IMAGES, ["row"])]
    assert (tables, statuses(root)) == ([[0, 1, 2], [3, 4], [5], [6]], 3 * ["ok"] + 3 * ["duplicate"] + ["ok"])
    assert column(root, "detail") == ["", "", "", *(f"of list.tsv:{line}" for line in (2, 1, 1)), ""]
    assert stored_captions(root) == [f"caption {i}" for i in range(4)]
    assert web.count_of("/twice.jpg") - before == 2  # once for each shard with new rows


def test_local_files_have_the_statuses_of_downloads(tmp_path: Path):
    folder, elsewhere, jpeg, png = tmp_path / "images", tmp_path / "elsewhere", encode(draw()), encode(draw(), "PNG")
    folder.mkdir()
    contents = {"g.png": png, "h.jpg": jpeg[: len(jpeg) // 2], "i.jpg": b"<html>", "j.jpg": encode(draw(20, 20))}
    contents["k.jpg"] = encode(draw(400, 400), quality=100)
    elsewhere.write_bytes(jpeg)
    os.mkfifo(folder / "a-fifo.jpg")
    (folder / "b-device.jpg").symlink_to("/dev/zero")
    (folder / "c-gone.jpg").symlink_to(tmp_path / "nowhere")
    (folder / "d-folder.jpg").mkdir()
    (folder / "e-link.jpg").symlink_to(elsewhere)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "f.jpg"))
        settings = CollectSettings("captions", images=str(folder), download=DownloadSettings(max_bytes=len(png)))
        quietly(tmp_path / "root", settings)
    assert statuses(tmp_path / "root") == [
        *4 * ["missing_file"], "ok", "missing_file", "ok", "truncated", "not_image", "bad_geometry", "too_big",
    ]  # fmt: skip
    sample = next(of(tmp_path / "root").read(IMAGES, "00000"))
    assert (sample.image, sample.url, sample.caption) == (jpeg, "e-link.jpg", "")


def test_a_folder_of_images_with_captions_is_imported_row_by_row(tmp_path: Path):
    said, folder = [], tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for number, path in enumerate(("a.jpg", "b.PNG", "more/c.jpg", "unnamed.jpg")):
        (folder / path).write_bytes(encode(draw(seed=number), "PNG" if "PNG" in path else "JPEG"))
    rows = ["a.jpg,one", "a.jpg,two", 'b.PNG,"three, four"', "more/c.jpg,five", "a.jpg,one", "gone.jpg,six"]
    (tmp_path / "captions.csv").write_text("\n".join(["file_name,text", *rows, "../captions.csv,seven"]))
    captioned = {"images": str(folder), "captions": str(tmp_path / "captions.csv")}
    settings = CollectSettings("captions", **captioned, rows_per_shard=4)
    collect(str(tmp_path / "root"), settings, said.append)
    assert statuses(tmp_path / "root") == ["ok"] * 4 + ["duplicate", "missing_file", "missing_file"]
    assert stored_captions(tmp_path / "root") == ["one", "two", "three, four", "five"]
    assert column(tmp_path / "root", "url")[:4] == ["a.jpg", "a.jpg", "b.PNG", "more/c.jpg"]
    (line,) = (line for line in said if "there is no image" in line)
    assert "captions.csv, row 7: missing_file, and 1 more of the shard: there is no image 'gone.jpg' in " in line
    assert "out of the folder" in column(tmp_path / "root", "detail")[6]
    assert quietly(tmp_path / "root", settings).new_shards == 0


ACCENTS = "caf\u00e9/\u1112\u1161\u11ab.jpg"  # one form of each: neither NFC nor NFD


@pytest.mark.parametrize(("in_list", "on_disk"), [("NFC", "NFD"), ("NFD", "NFC"), ("NFC", "NFC")])
def test_a_name_in_another_unicode_form_is_found_and_backslashes_get_a_hint(in_list, on_disk, tmp_path: Path):
    file = tmp_path / "images" / unicodedata.normalize(on_disk, ACCENTS)
    file.parent.mkdir(parents=True)
    file.write_bytes(encode(draw()))
    name = unicodedata.normalize(in_list, ACCENTS)
    windows = name.replace("/", "\\")
    (tmp_path / "list.tsv").write_text(f"one\t{name}\ntwo\t{windows}\nthree\tsub\\gone.jpg\n")
    settings = CollectSettings("captions", images=str(tmp_path / "images"), captions=str(tmp_path / "list.tsv"))
    quietly(tmp_path / "root", settings)
    assert statuses(tmp_path / "root") == ["ok", "missing_file", "missing_file"]
    assert column(tmp_path / "root", "url")[0] == name
    _, windows, gone = column(tmp_path / "root", "detail")
    assert re.search(rf"with / in place of the backslashes of Windows, it is {file}$", windows)
    assert "backslash" not in gone
    (tmp_path / "list.tsv").write_text((tmp_path / "list.tsv").read_text().replace("\\", "/"))  # the way out
    quietly(tmp_path / "again", settings)
    assert statuses(tmp_path / "again") == ["ok", "ok", "missing_file"]


@pytest.mark.parametrize("keep", [False, True])
def test_a_row_without_a_caption_has_a_status_unless_it_is_asked_for(keep: bool, tmp_path: Path):
    captions = ["a dog", "", "  ", "\u00a0\u3000", "\u200b\ufeff\u00ad", ".", "\U0001f415", "\x00"]
    (tmp_path / "a.jpg").write_bytes(encode(draw()))
    (tmp_path / "list.tsv").write_text("".join(f"{caption}\ta.jpg\n" for caption in captions))
    files = {"images": str(tmp_path), "captions": str(tmp_path / "list.tsv")}
    quietly(tmp_path / "root", CollectSettings("captions", **files, keep_empty_captions=keep))
    assert keep or column(tmp_path / "root", "detail")[1].startswith("list.tsv:2 has no caption; --keep_empty_captions")
    kept = [keep or caption in ("a dog", ".", "\U0001f415") for caption in captions]
    assert statuses(tmp_path / "root") == ["ok" if one else "empty_caption" for one in kept]
    assert stored_captions(tmp_path / "root") == [caption for caption, one in zip(captions, kept, strict=True) if one]
    quietly(tmp_path / "root", CollectSettings("captions", **files, keep_empty_captions=not keep))  # keeps its rows
    assert statuses(tmp_path / "root") == ["ok" if one else "empty_caption" for one in kept]


def test_a_list_without_any_caption_is_collected_as_its_error_says(tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(encode(draw()))
    (tmp_path / "list.tsv").write_text(" \ta.jpg\n")
    settings = CollectSettings("captions", images=str(tmp_path), captions=str(tmp_path / "list.tsv"))
    with pytest.raises(ValueError, match=r"1 empty_caption.*list\.tsv:1 has no caption; --keep_empty_captions"):
        quietly(tmp_path / "root", settings)
    quietly(tmp_path / "root", dataclasses.replace(settings, keep_empty_captions=True))
    assert statuses(tmp_path / "root") == ["ok"]


@pytest.mark.parametrize("value", [None, float("nan"), "", [], ["", " "]])
def test_a_missing_caption_in_json_is_an_empty_one(value: object, tmp_path: Path):
    (tmp_path / "a.jpg").write_bytes(encode(draw()))
    rows = [{"image": "a.jpg", "caption": value}, {"image": "a.jpg", "caption": "a dog"}]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    quietly(tmp_path / "root", CollectSettings("captions", images=str(tmp_path), captions=str(tmp_path / "list.json")))
    assert set(statuses(tmp_path / "root")[:-1]) == {"empty_caption"}
    assert stored_captions(tmp_path / "root") == ["a dog"]


def test_a_folder_may_grow_anywhere_and_its_new_files_make_new_shards(tmp_path: Path):
    folder, root = tmp_path / "images", tmp_path / "root"
    folder.mkdir()

    def put(*names: str) -> CollectSettings:
        for name in names:
            (folder / name).write_bytes(encode(draw(seed=sum(name.encode()))))
        return CollectSettings("captions", images=str(folder), rows_per_shard=2)

    (folder / ".hidden.jpg").write_bytes(b"")
    (folder / "._b.jpg").write_bytes(b"of macOS")
    quietly(root, put("b.jpg", "d.jpg", "f.jpg"))
    before = {path: data for path, data in objects(root).items() if "/rows/" not in path}
    assert quietly(root, put("a.jpg", "e.tif", "c.HEIC", "g.png")).new_shards == 2
    assert column(root, "url") == ["b.jpg", "d.jpg", "f.jpg", "a.jpg", "c.HEIC", "e.tif", "g.png"]
    assert column(root, "row") == [*range(7)]
    assert statuses(root) == ["ok"] * 7  # the format is that of the bytes
    assert objects(root).items() >= before.items()
    # A shard that is missing is filled, whatever the folder has got in the meantime.
    of(root).store.delete("captions/images/00000.parquet")
    assert quietly(root, put("0.jpg", "z.jpg")).new_shards == 2
    urls = ["0.jpg", "b.jpg", "f.jpg", "a.jpg", "c.HEIC", "e.tif", "g.png", "d.jpg", "z.jpg"]
    assert column(root, "url") == urls
    assert quietly(root, put()).new_shards == 0
    assert list(verify(Inventory(open_store(str(root))))) == []


def test_a_file_that_changed_or_vanished_under_committed_shards_is_named(tmp_path: Path):
    folder, root = tmp_path / "images", tmp_path / "root"
    folder.mkdir()
    contents = {"a.jpg": encode(draw(seed=1)), "b.jpg": encode(draw(seed=2)), "c.jpg": b"torn", "d.jpg": encode(draw())}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    settings = CollectSettings("captions", images=str(folder))
    quietly(root, settings)
    (folder / "c.jpg").unlink()  # of which nothing is stored
    (folder / "a.jpg").write_bytes(contents["d.jpg"])
    os.utime(folder / "a.jpg", (0, 0))  # as copied with its date
    (folder / "d.jpg").unlink()
    with pytest.raises(
        ValueError, match=r"2 files of committed .*: a\.jpg has changed, d\.jpg is missing\. .* withdraw"
    ):
        quietly(root, settings)
    withdraw(open_store(str(root)), ["d.jpg"])  # both ways out
    (folder / "a.jpg").write_bytes(contents["a.jpg"])
    assert quietly(root, settings).new_shards == 0


def objects(root: Path) -> dict[str, bytes]:
    """Every object of a root."""
    store = open_store(str(root))
    return {info.path: store.get(info.path) for info in store.list()}


def test_hosts_that_are_gone_cost_neither_a_shard_nor_an_earlier_result(web: Web, tmp_path: Path):
    root, other, file = tmp_path / "root", tmp_path / "other", tmp_path / "list.tsv"
    web.put("/keeps.jpg", send(encode(draw())))
    with Web("0.0.0.0") as gone:
        hosts = [f"127.0.0.{i}:{gone.server.server_port}" for i in range(1, 6)]  # all of 127.0.0.0/8 is this machine
        lines = [f"caption {i}\thttp://{host}/{i}.jpg" for i, host in enumerate(hosts)] + ["caption\tnonsense"]
        download = DownloadSettings(deadline=3, retries=0, allowed_hosts=(*hosts, web.host))
        settings = functools.partial(served, web, file, *lines, rows_per_shard=10, download=download)
        quietly(root, settings("a\t/keeps.jpg"))
    before = objects(root)
    assert statuses(root) == 5 * ["http_404"] + ["bad_url", "ok"]
    quietly(root, settings("a\t/keeps.jpg", retry_statuses=("http_4xx",)))
    assert objects(root) == before
    message = r"none of the 5 hosts of shard 00000 \(rows 0 to 6 of .*\) could be reached: 5 connect, .*http:"
    with pytest.raises(ConnectionError, match=message + ".*--commit_unreachable"):
        quietly(other, settings())
    assert of(other).shards(IMAGES) == []
    quietly(other, settings(commit_unreachable=True))
    assert statuses(other) == 5 * ["connect"] + ["bad_url"]


@pytest.mark.parametrize(
    ("hosts", "found", "reached"),
    [
        (5, ["dns", "connect", "timeout", "host_timeout", "dns", "bad_url", "blocked_address"], False),
        (1, 20 * ["connect"], False),
        (1, 19 * ["connect"], True),
        (4, 4 * ["connect"], True),  # four servers may well be gone
        (5, [*5 * ["connect"], "tls"], True),
    ],
)
def test_a_network_is_lost_if_no_host_of_many_rows_is_reached(hosts: int, found: list[str], reached: bool):
    urls = [f"http://host{i % hosts}.example/{i}.jpg" for i in range(len(found))]
    rows = [CaptionRow(i, "a", url, status=status) for i, (url, status) in enumerate(zip(urls, found, strict=True))]
    part, settings = Part("00000", 0, len(rows)), CollectSettings("captions", captions="list.tsv")
    with contextlib.nullcontext() if reached else pytest.raises(ConnectionError, match="shard 00000"):
        check_network(part, rows, settings)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([f"caption {i}\thttp://127.0.0.1:8791/{i}.jpg" for i in range(5)], "download.allowed_hosts"),
        (["a\tno", "b\taddress"], "list.tsv:1 has 'no' as its URL"),
        (["a\thttp://user:secret@127.0.0.1:9/?key=secret"], "bad_url"),
        ([], "list.tsv has no readable row"),
        (None, "not_image"),
    ],
)
def test_a_collection_without_an_image_fails_and_commits_nothing(lines: list[str] | None, named: str, tmp_path: Path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"<html>")
    (tmp_path / "list.tsv").write_text("".join(f"{line}\n" for line in lines or ()))
    origin = f"--images={tmp_path / 'images'}" if lines is None else f"--captions={tmp_path / 'list.tsv'}"
    for _ in range(2):  # a rerun finds nothing done
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / "root"), "captions", origin, "--rows_per_shard=2"])
        assert named in ended.value.code  # a string: printed to stderr, and the exit status is 1
        assert "secret" not in ended.value.code
        assert [one.path for one in of(tmp_path / "root").store.list() if "/rows/" not in one.path] == []


def test_a_shard_without_an_image_waits_for_the_first_image_of_its_dataset(web: Web, tmp_path: Path):
    root, file = tmp_path / "root", tmp_path / "list.tsv"
    web.put("/waits.jpg", send(encode(draw())))
    lines = [f"a\t/waits/{i}" for i in range(4)]
    settings = functools.partial(served, web, file, shards_per_task=1)
    with pytest.raises(ValueError, match=r"4 http_404"):
        quietly(root, settings(*lines))
    assert of(root).shards(IMAGES) == []
    lines.append("e\t/waits.jpg")
    collected = quietly(root, settings(*lines))
    assert (collected.new_shards, collected.counts) == (3, {"http_404": 4, "ok": 1})
    lines += ["f\t/waits/6", "g\t/waits/7"]
    assert quietly(root, settings(*lines)).new_shards == 1
    assert statuses(root) == 4 * ["http_404"] + ["ok"] + 2 * ["http_404"]


def test_rows_of_committed_shards_are_requested_again_by_their_status_but_no_withdrawn_url(web: Web, tmp_path: Path):
    root, file, image = tmp_path / "root", tmp_path / "list.tsv", send(encode(draw(seed=3)))
    later, never = in_turn(send(b"", 503), image), send(b"", 502)
    for name, answer in {"once": image, "wall": image, "later": later, "never": never}.items():
        web.put(f"/again/{name}.jpg", answer)
    names = ["once", "later", "gone", "once", "never", "once", "once", "wall", "never", "wall", "once"]
    lines = [f"{caption}\t/again/{name}.jpg" for caption, name in zip("abcdefaghij", names, strict=True)]
    settings = functools.partial(served, web, file, rows_per_shard=3)
    quietly(root, settings(*lines[:9]))
    before, old = objects(root), of(root).pin(IMAGES)
    found = statuses(root)
    assert found == ["ok", "http_503", "http_404", "ok", "http_502", "ok", "duplicate", "ok", "http_502"]
    withdraw(open_store(str(root)), [f"http://{web.host}/again/wall.jpg"])
    count = len(web.requests)
    again = settings(*lines, retry_statuses=("http_5xx", "timeout"))
    collected = quietly(root, again)
    requested = [path.removeprefix("/again/") for _, path, _ in web.requests[count:]]
    assert sorted(requested) == ["later.jpg", "never.jpg", "never.jpg", "once.jpg"]
    assert (collected.new_shards, collected.counts["withdrawn"]) == (1, 2)
    assert statuses(root) == ["ok", "ok", *found[2:7], "withdrawn", "http_502", "withdrawn", "ok"]
    assert stored_captions(root) == ["a", "b", "d", "f", "j"]
    assert objects(root).items() > before.items()  # nothing that was there has changed
    manifests = {
        path for path in objects(root).keys() - before.keys() if path.endswith("parquet") and "rows" not in path
    }
    assert manifests == {  # 00001 is as it was, so no revision of it is written
        *(f"captions/images/{name}.parquet" for name in ("00000.r2", "00002.r2", "00003", f"snapshots/{old.id}"))
    }
    index, new = of(root).pinned(IMAGES, old.id), of(root).pin(IMAGES)
    assert (old.ok_rows, len(index), new.ok_rows) == (4, 4, 5)
    assert list(verify(Inventory(open_store(str(root))))) == []
    quietly(root, again)
    assert of(root).headers(IMAGES)["00000"].revision == 2


SECRET = "s3cr3t"


def test_no_detail_and_no_log_has_passwords_or_keys_of_urls(web: Web, tmp_path: Path, capfd, monkeypatch):
    monkeypatch.setattr("storage.collect.run._REPORT_SECONDS", 0)
    ways = {
        "gone": send(b"", 404, **{"X-Note": SECRET}),
        "loop": send(b"", 302, Location=f"/loop?key={SECRET}"),
        "away": send(b"", 302, Location=f"http://me:{SECRET}@example.com/?key={SECRET}"),
        "junk": send(b"", 302, Location=f"http://[::1?key={SECRET}"),
        "wall": send(b"", 302, Location=f"http://10.0.0.1/?key={SECRET}"),
        "raw": raw(b"this is no HTTP\r\n\r\n"),
        "silent": silent(20),
        "echo": raw(f"HTTP/1.1 403 see http://x/?key={SECRET}\r\nContent-Length: 0\r\n\r\n".encode()),
        "fine": send(encode(draw())),
    }
    urls = [web.put(f"/{name}?key='{SECRET}'&token={SECRET}", answer) for name, answer in ways.items()]
    web.put(f"/loop?key={SECRET}", ways["loop"])
    urls += [
        f"http://me:{SECRET}@{web.host}/gone",
        f"http://me:p/{SECRET}@{web.host}/gone",
        f"http://{web.host}:port/?key={SECRET}",
        f"https://{web.host}/?X-Amz-Signature={SECRET}",
        f"http://127.0.0.1:{free_port()}/?key={SECRET}",
    ]
    file, root = tmp_path / "list.tsv", tmp_path / "root"
    arguments = ["captions", f"--captions={file}", "--download.deadline=2", "--download.retries=0"]
    file.write_text("".join(f"caption {i}\t{url}\n" for i, url in enumerate(urls)))
    main([str(root), *arguments, f"--download.allowed_hosts={web.host}"])
    assert column(root, "url") == urls  # what the list has is the key of the row
    assert {"http_404", "bad_url", "timeout", "bad_response", "ok"} <= {*statuses(root)}
    assert [detail for detail in column(root, "detail") if SECRET in detail] == []
    hosts = [f"127.0.0.{i}:9" for i in range(1, 7)]
    for name, text, named in (
        ("unreadable", f"caption http://me:{SECRET}@host/?key={SECRET}\n" + 2 * "a\tnonsense\n", "list.tsv:1: "),
        ("unreachable", "".join(f"a\thttp://{host}/1?key={SECRET}\n" for host in hosts), "http://127.0.0.1:9/1?"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=re.escape(named)) as ended:
            main([str(tmp_path / name), *arguments, "--download.allowed_hosts", *hosts])
        assert SECRET not in ended.value.code
    assert SECRET not in "".join(capfd.readouterr())


def command_of(web: Web, root: str, settings: CollectSettings) -> list[str]:
    command = [sys.executable, "-m", "vlbert", "collect", root, "captions", f"--captions={settings.captions}"]
    return [*command, f"--rows_per_shard={settings.rows_per_shard}", f"--download.allowed_hosts={web.host}"]


def test_a_full_disk_is_named_with_the_way_out(web: Web, tmp_path: Path):
    large = encode(draw())
    large = large[:2] + 2 * (b"\xff\xfe\xff\xff" + bytes(65533)) + large[2:]
    urls = [web.put(f"/large.jpg?{i}", send(large)) for i in range(4)]
    settings = served(web, tmp_path / "list.tsv", *(f"caption\t{url}" for url in urls), rows_per_shard=4)
    program = " ".join([*command_of(web, f"{tmp_path}/root", settings), "--download.retries=0"])
    # No file may be larger than this: enough for one image, and too little for four of them.
    limit = len(large) // 1024 + 2
    command = ["bash", "-c", f"ulimit -f {limit}; export TMPDIR={tmp_path}; exec {program}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 1
    assert re.search(rf"File too large.* in {tmp_path}.*et TMPDIR to a folder with more space", done.stderr)
    assert done.stderr.count("\n") == 1
    assert of(tmp_path / "root").shards(IMAGES) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_collection_that_is_ended_goes_on_and_only_a_kill_leaves_a_claim(number, status, web: Web, local, tmp_path):
    for i in range(3):
        web.put(f"/kill/{i}.jpg", send(encode(draw(seed=i))))
    web.put("/kill/slow.jpg", silent(60))  # else the second shard would be done
    settings = served(web, tmp_path / "list.tsv", *(f"caption\t/kill/{name}.jpg" for name in (0, 1, 2, "slow")))
    # Under nohup, or in the background of a script, it would not heed SIGINT.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = command_of(web, local.store.uri(), settings)
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=PROJECT, preexec_fn=heeds)
    try:
        end = time.monotonic() + 60
        while local.shards(IMAGES) != ["00000"]:
            assert running.poll() is None, "the collection ended by itself"
            assert time.monotonic() < end
            time.sleep(0.05)
        running.send_signal(number)
        _, stderr = running.communicate(timeout=30)
    finally:
        running.kill()
    claims = [claim.path for claim in local.store.list("captions/images/claims/")]
    assert (running.returncode, stderr, bool(claims)) == (status, "", number == signal.SIGKILL)
    for claim in claims:
        local.store.delete(claim)  # it would expire, too
    web.put("/kill/slow.jpg", send(encode(draw())))
    count = len(web.requests)
    assert quietly(local.store.uri(), settings).new_shards == 1
    assert sorted(path for _, path, _ in web.requests[count:]) == ["/kill/2.jpg", "/kill/slow.jpg"]


def test_the_time_left_counts_what_hangs(web: Web, local: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Beside 60 URLs that took no time, two take three seconds, and three more in the second pass."""
    image = encode(draw())
    monkeypatch.setattr("storage.collect.run._REPORT_SECONDS", 0.5)
    lines = [f"caption\t{web.put(f'/left/{i}.jpg', silent(9) if i % 30 == 9 else send(image))}" for i in range(60)]
    settings = served(web, tmp_path / "list.tsv", *lines, rows_per_shard=60)
    settings = dataclasses.replace(settings, download=settings_for(web, deadline=6.0, retries=1))
    reports = []
    collect(local.store.uri(), settings, reports.append)
    left = [int(seconds) for seconds in re.findall(r"58 of 60 rows: 58 ok;.*, 0:0(\d) left", "\n".join(reports))]
    assert len(left) > 6
    assert sorted(left)[len(left) // 2] >= 3
    assert max(left) <= 6


def test_an_error_of_the_log_ends_a_collection(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.collect.run._REPORT_SECONDS", 0.1)
    lines = [f"caption\t{web.put('/late.jpg', silent(9))}"]
    settings = served(web, tmp_path / "list.tsv", *lines, download=settings_for(web, deadline=1, retries=0))

    def log(line: str) -> None:
        if "0 of 1 rows" in line:
            raise BrokenPipeError("nobody reads the progress")

    with pytest.raises(BrokenPipeError, match="nobody reads the progress"):
        collect(str(tmp_path / "root"), settings, log)


def test_a_shard_that_another_worker_committed_meanwhile_is_not_requested_again(web: Web, tmp_path: Path):
    root, answer = str(tmp_path / "root"), in_turn(send(b"", 404), send(b"", 403), send(b"", 410))
    lines = [f"caption\t{web.put('/seen.jpg', send(encode(draw())))}", f"caption\t{web.put('/both.jpg', answer)}"]
    settings = functools.partial(served, web, tmp_path / "list.tsv", *lines)
    quietly(root, settings())

    def run_group(root: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        quietly(root, settings)
        return collect_group(root, settings, group, on_commit)

    quietly(root, settings(retry_statuses=("http_4xx",)), run_group)
    assert (web.count_of("/both.jpg"), statuses(root)) == (2, ["ok", "http_403"])


def test_a_collection_that_stood_still_asks_again_and_blames_no_server(web: Web, local: Catalog, tmp_path: Path):
    """It is stopped for longer than a URL's deadline, as with a virtual machine that is paused, in its only pass."""
    answer = raw(b"", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", encode(draw()), pause=0.3)
    lines = [f"caption {i}\t{web.put(f'/still/{i}.jpg', answer)}" for i in range(60)]
    settings = served(web, tmp_path / "list.tsv", *lines, rows_per_shard=60)
    command = [*command_of(web, local.store.uri(), settings), "--download.deadline=3", "--download.retries=0"]
    running = subprocess.Popen(command, cwd=PROJECT)
    try:
        for count in (5, 40):
            while len(web.requests) < count:
                assert running.poll() is None
                time.sleep(0.01)
            running.send_signal(signal.SIGSTOP)
            time.sleep(4)
            running.send_signal(signal.SIGCONT)
        assert running.wait(60) == 0
    finally:
        running.kill()
    assert local.counts(IMAGES) == {"ok": 60}


LIST = {"name": "x", "captions": "a.tsv"}


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (CollectSettings, {"name": "x"}, "captions .* images"),
        (CollectSettings, LIST | {"webdataset": "folder"}, "captions .* webdataset"),
        (CollectSettings, LIST | {"columns": ("url", "url")}, "columns is"),
        (CollectSettings, LIST | {"images": "folder", "retry_statuses": ("dns",)}, "retry_statuses"),
        (CollectSettings, LIST | {"rows_per_shard": 0}, "rows_per_shard is 0"),
        (CollectSettings, LIST | {"retry_statuses": ("dns", "withdrawn")}, "retry_statuses names 'withdrawn'"),
        (DownloadSettings, {"concurrency": 0}, "concurrency"),
        *((DownloadSettings, {"allowed_hosts": (host,)}, "host:port") for host in ("127.0.0.1", "*:80", "http://a:80")),
        (DownloadSettings, {"contact": "a\r\nX-Header: b"}, "control characters"),
        (ImageSettings, {"max_side": 100}, "min_side"),
    ],
)
def test_settings_are_refused_by_field(kind: type, settings: dict[str, object], named: str):
    with pytest.raises(ValueError, match=named):
        kind(**settings)
