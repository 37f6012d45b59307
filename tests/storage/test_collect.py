"""A caption list or a folder of images, on a tiny demo data, becomes committed shards: without Prefect."""

import dataclasses
import functools
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st
from places import PROJECT
from seeded import put_checkpoint
from web import Web, draw, encode, in_turn, raw, send, silent

from demo.data import DemoData
from storage.catalog import Catalog
from storage.collect import SHARDS_AT_ONCE, Group, NothingStored, OnCommit, check_network, collect, collect_group, main
from storage.collection_plan import CollectSettings, Part, check_committed, plan
from storage.download import CaptionRow, Download, DownloadSettings, commit_images
from storage.garbage import collect_garbage, find_garbage
from storage.inventory import Inventory
from storage.normalise import NormalisedImage
from storage.object_store import StorageUnreachable, open_store
from storage.redact import redacted, shown_url
from storage.spool import PartialShard, Spool, remove_partial
from storage.verify import verify

IMAGES = "images"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


def captions(demo_data: DemoData, file: Path | None = None, **changes: object) -> CollectSettings:
    """The captioned scenes as a dataset in shards of 10 rows, two a group."""
    settings = {
        "captions": str(file or demo_data.train_tsv),
        "download": DownloadSettings(
            deadline=1.5, retries=0, second_pass=0, allowed_hosts=(f"127.0.0.1:{demo_data.port}",)
        ),
        "rows_per_shard": 10,
        "shards_per_task": 2,
    }
    return CollectSettings("captions", **(settings | changes))


def refcoco(demo_data: DemoData) -> CollectSettings:
    return CollectSettings("refcoco+", images=str(demo_data.task_images), rows_per_shard=6)


def served(web: Web, file: Path, *lines: str, **changes: object) -> CollectSettings:
    """A list with these lines in shards of two rows; `/name` stands for that page of the server."""
    file.write_text("".join(line.replace("\t/", f"\thttp://{web.host}/") + "\n" for line in lines))
    settings = {
        "captions": str(file),
        "download": DownloadSettings(deadline=3, retries=0, allowed_hosts=(web.host,)),
        "rows_per_shard": 2,
    }
    return CollectSettings("captions", **(settings | changes))


@pytest.fixture(scope="module")
def collected(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the captioned scenes; to be copied, not changed."""
    root = tmp_path_factory.mktemp("collected")
    collect(str(root), captions(demo_data), lambda line: None)
    return root


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> str:
    """A root of the test's own with the captioned scenes collected."""
    return str(shutil.copytree(collected, tmp_path / "root"))


def of(root: str, dataset: str = "captions") -> Catalog:
    return Catalog(open_store(root), dataset)


def statuses(root: str) -> list[str]:
    """The status of every row of the captions, in order."""
    tables = of(root).columns(IMAGES, ["status"])
    return [status for table in tables for status in table["status"].to_pylist()]


def test_shards_are_ranges_of_rows_and_every_row_is_in_one(demo_data: DemoData, root: str):
    assert [(part.shard, part.start, part.stop) for part in plan(captions(demo_data), {})] == [
        ("00000", 0, 10),
        ("00001", 10, 20),
        ("00002", 20, 30),
        ("00003", 30, 32),
    ]
    tables = [of(root).manifest(IMAGES, shard).table for shard in of(root).shards(IMAGES)]
    rows = [table["row"].to_pylist() for table in tables]
    assert rows == [list(range(10)), list(range(10, 20)), list(range(20, 30)), [30, 31]]
    urls = [url for table in tables for url in table["url"].to_pylist()]
    assert urls == [line.split("\t")[1] for line in demo_data.train_tsv.read_text().splitlines()]
    assert of(root).counts(IMAGES)["ok"] >= 24


def test_what_is_committed_is_not_downloaded_again_and_the_stage_says_so(demo_data: DemoData, root: str):
    said, groups = [], []
    again = collect(root, captions(demo_data), said.append, lambda *arguments: groups.append(arguments))
    assert said == ["captions: nothing to download: 4 of 4 shards are committed"]
    assert groups == []
    assert (again.shards, again.new_shards) == (4, 0)
    assert again.counts == of(root).counts(IMAGES)


def contents(root: str) -> dict[str, tuple]:
    """By shard what the same list must give again: the tar's bytes and every row's status.

    Not the details of what failed: how often a server was asked before the deadline is a matter of the moment.
    """
    headers, tables = of(root).headers(IMAGES), of(root).columns(IMAGES, ["row", "key", "status"])
    return {s: (h.tar_sha256, t.to_pylist()) for (s, h), t in zip(headers.items(), tables, strict=True)}


def test_only_the_missing_shards_are_collected_in_groups(demo_data: DemoData, root: str):
    before = contents(root)
    for shard in ("00000", "00002", "00003"):
        of(root).store.delete(f"captions/images/{shard}.parquet")
    said, groups = [], []

    def group(at: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        groups.append([part.shard for part in group.parts])
        return collect_group(at, settings, group, on_commit)

    result = collect(root, captions(demo_data), said.append, group)
    assert groups == [["00000", "00002"], ["00003"]]
    assert result.new_shards == 3
    assert said[0] == f"captions: 3 of 4 shards to collect, 32 rows in {demo_data.train_tsv}"
    assert said[1].startswith("captions: 2 of 3 shards collected: ")
    assert contents(root) == before


def test_a_group_that_is_tried_again_leaves_committed_shards_alone(demo_data: DemoData, root: str):
    before = contents(root)
    of(root).store.delete("captions/images/00003.parquet")
    said = []
    group = Group(tuple(plan(captions(demo_data), {})), {"ok": 8}, 40, 4)
    counts = collect_group(root, captions(demo_data, report_every=0), group, log=said.append)
    assert counts == of(root).counts(IMAGES)  # of the whole group, whoever committed it
    assert contents(root) == before
    # 30 rows were there: what is told are rows 30 and 31 alone, after the eight of an earlier group.
    assert said[-1].startswith("captions: 40 of 40 rows: ")
    assert all(line.startswith(("captions: 39 of 40", "captions: 40 of 40")) for line in said)


def test_a_list_that_changed_under_committed_shards_is_an_error(demo_data: DemoData, root: str, tmp_path: Path):
    lines = demo_data.train_tsv.read_text().splitlines(keepends=True)
    changed = tmp_path / "changed.tsv"
    for new, what in (
        ([*lines[:15], "another " + lines[15], *lines[16:]], "shard 00001 holds rows 10 to 20"),
        (lines[1:], "shard 00000 holds rows 0 to 10"),
        (lines[:30], "shard 00003 holds rows 30 to 32 of .*, now it would be only 3 shards"),
        (lines[:31], "shard 00003 holds rows 30 to 32 of .*, now it would be rows 30 to 31"),
    ):
        changed.write_text("".join(new))
        with pytest.raises(ValueError, match=f"captions: the list changed under committed shards: {what}"):
            collect(root, captions(demo_data, changed))
    with pytest.raises(ValueError, match="shard 00000 was collected with other image settings: max_side 1024, now 512"):
        collect(root, captions(demo_data, download=DownloadSettings(max_side=512)))
    changed.write_text("".join(lines))  # under another name it is the same list
    assert collect(root, captions(demo_data, changed), lambda line: None).new_shards == 0


def test_a_list_may_grow_and_its_new_rows_make_new_shards(demo_data: DemoData, tmp_path: Path):
    lines = demo_data.train_tsv.read_text().splitlines()
    growing, root = tmp_path / "growing.tsv", str(tmp_path / "root")
    for rows, rows_per_shard, new_shards in ((10, 10, 1), (14, 10, 1), (14, 5, 0), (20, 4, 2)):
        growing.write_text("\n".join(lines[:rows]))  # without a newline at the end, which the next round then has
        dataset = captions(demo_data, growing, rows_per_shard=rows_per_shard)
        assert collect(root, dataset, lambda line: None).new_shards == new_shards
    tables = [of(root).manifest(IMAGES, shard).table for shard in of(root).shards(IMAGES)]
    assert [table["row"].to_pylist() for table in tables] == [
        [*range(10)],
        [*range(10, 14)],
        [*range(14, 18)],
        [18, 19],
    ]


def test_an_empty_list_or_folder_is_an_error(demo_data: DemoData, tmp_path: Path):
    (tmp_path / "empty.tsv").touch()
    with pytest.raises(ValueError, match="holds nothing to collect for captions"):
        collect(str(tmp_path / "root"), captions(demo_data, tmp_path / "empty.tsv"))
    with pytest.raises(ValueError, match="is not a folder"):
        plan(dataclasses.replace(refcoco(demo_data), images=str(tmp_path / "nowhere")), {})


def test_a_folder_of_images_becomes_shards_whose_rows_count_through(demo_data: DemoData, tmp_path: Path):
    root, said = str(tmp_path), []
    assert collect(root, refcoco(demo_data), said.append).counts == {"ok": 16}
    catalog = of(root, "refcoco+")
    tables = [catalog.manifest(IMAGES, shard).table for shard in catalog.shards(IMAGES)]
    assert [table["row"].to_pylist() for table in tables] == [[*range(6)], [*range(6, 12)], [*range(12, 16)]]
    names = sorted(file.name for file in demo_data.task_images.iterdir())
    assert [url for table in tables for url in table["url"].to_pylist()] == names
    assert collect(root, refcoco(demo_data), said.append).new_shards == 0
    done = {shard: catalog.manifest(IMAGES, shard).meta for shard in catalog.shards(IMAGES)}
    with pytest.raises(ValueError, match="the list changed"):
        check_committed(done, plan(refcoco(demo_data), {})[1:], refcoco(demo_data))


def test_progress_is_logged_with_rows_by_status(web: Web, tmp_path: Path):
    web.put("/progress.jpg", send(encode(draw())))
    lines = [f"caption {i}\t/{'progress.jpg' if i % 2 else 'gone.jpg'}" for i in range(6)]
    often, seldom = [], []
    settings = served(web, tmp_path / "list.tsv", *lines, shards_per_task=2, report_every=0)
    collect(str(tmp_path / "one"), settings, often.append)
    last = [line for line in often if line.startswith("captions: 6 of 6 rows: 3 http_404, 3 ok; ")][-1]
    assert re.fullmatch(r".*; [\d,]+\.\d rows/s, 0:\d\d gone, 0:00 left", last)
    told = [int(line.split()[1]) for line in often if " rows: " in line]
    assert told == sorted(told)
    assert told[0] == 1
    collect(str(tmp_path / "two"), dataclasses.replace(settings, report_every=60), seldom.append)
    assert seldom == [line for line in often if " rows: " not in line]


def test_a_row_that_repeats_one_of_another_shard_is_a_duplicate_of_it(web: Web, tmp_path: Path):
    web.put("/twice.jpg", send(encode(draw())))
    lines = [f"caption {i}\t/twice.jpg" for i in (0, 1, 2, 1, 0, 0, 3)]
    file, root = tmp_path / "list.tsv", str(tmp_path / "root")
    for rows in (5, 7):  # the list grows; what is a duplicate does not depend on when it came
        collect(root, served(web, file, *lines[:rows]), lambda line: None)
    tables = [table.to_pydict() for table in of(root).columns(IMAGES, ["row", "status", "detail"])]
    found = [row for table in tables for row in zip(*table.values(), strict=True)]
    assert found == [
        (0, "ok", ""),
        (1, "ok", ""),
        (2, "ok", ""),
        (3, "duplicate", "of row 1"),
        (4, "duplicate", "of row 0"),
        (5, "duplicate", "of row 0"),
        (6, "ok", ""),
    ]
    assert [sample.caption for shard in of(root).shards(IMAGES) for sample in of(root).read(IMAGES, shard)] == [
        f"caption {i}" for i in range(4)
    ]
    assert [part.duplicates for part in plan(served(web, file, *lines, rows_per_shard=4), {})] == [
        ((3, 1),),
        ((4, 0), (5, 0)),
    ]


def test_a_shard_of_which_no_host_is_reached_is_not_committed(web: Web, tmp_path: Path):
    web.put("/reached.jpg", send(encode(draw())))
    with Web() as gone:
        port = gone.server.server_port
    # All of 127.0.0.0/8 is this machine: five hosts, and nobody listens.
    hosts = [f"127.0.0.{i}:{port}" for i in range(1, 6)]
    download = DownloadSettings(deadline=3, retries=0, second_pass=0, allowed_hosts=(web.host, *hosts))
    dead = [f"caption {i}\thttp://{host}/{i}.jpg" for i, host in enumerate(hosts)]
    unasked = "caption\tnonsense"

    def attempt(name: str, *lines: str, **changes: object) -> list[str]:
        changes = {"rows_per_shard": 10} | changes
        settings = served(web, tmp_path / f"{name}.tsv", *lines, download=download, **changes)
        collect(str(tmp_path / name), settings, lambda line: None)
        return statuses(str(tmp_path / name))

    message = r"none of the 5 hosts of shard 00000 \(rows 0 to 6 of .*\) could be reached: 5 connect, the first http:"
    with pytest.raises(ConnectionError, match=message + ".*commit_unreachable=true"):
        attempt("lost", *dead, unasked)
    assert of(str(tmp_path / "lost")).shards(IMAGES) == []
    assert attempt("lost", *dead, unasked, commit_unreachable=True) == 5 * ["connect"] + ["bad_url"]
    # Four servers may well be gone.
    few = [*dead[:4], dead[0] + "?again", "caption\t/reached.jpg"]
    assert attempt("few", *few, rows_per_shard=5) == 5 * ["connect"] + ["ok"]
    many = [f"caption {i}\thttp://{hosts[0]}/{i}.jpg" for i in range(20)]
    with pytest.raises(ConnectionError, match="none of the 1 hosts of shard 00000 .*whether the server is up"):
        attempt("not up", *many, rows_per_shard=20)
    more = ["caption\t/gone.jpg", "caption\t/reached.jpg"]
    assert set(attempt("but one", *many, *more, rows_per_shard=21)) > {"http_404"}
    assert attempt("one", *dead, "caption\t/reached.jpg") == 5 * ["connect"] + ["ok"]
    assert attempt("answer", *dead, *more, rows_per_shard=6) == 5 * ["connect"] + ["http_404", "ok"]


@pytest.mark.parametrize("status", ["dns", "connect", "timeout", "host_timeout"])
def test_each_way_of_not_reaching_a_host_counts_as_no_network(status: str):
    rows = [CaptionRow(i, "a", f"http://host{i % 5}.example/{i}.jpg") for i in range(10)]
    part, settings = Part("00000", 0, 10, "list.tsv"), CollectSettings("captions", captions="list.tsv")
    lost = [Download(row, status if row.row else "timeout", "", None) for row in rows]
    with pytest.raises(ConnectionError, match="none of the 5 hosts"):
        check_network(part, lost, settings)
    for other in ("http_404", "refused_by_robots", "tls", "bad_response", "too_big"):
        check_network(part, [*lost[1:], Download(rows[0], other, "", None)], settings)


def closed_port() -> str:
    with Web() as gone:
        return gone.host


def image_that_is_html(folder: Path) -> list[str]:
    (folder / "images").mkdir()
    (folder / "images" / "a.jpg").write_bytes(b"<html>")
    return [f"images={folder / 'images'}"]


def listed(*lines: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "list.tsv").write_text("".join(f"{line}\n" for line in lines))
        return [f"captions={folder / 'list.tsv'}", "rows_per_shard=2"]

    return write


@pytest.mark.parametrize(
    ("origin", "named"),
    [
        (
            listed(*(f"caption {i}\thttp://127.0.0.1:8791/{i}.jpg" for i in range(5))),
            "set download.allowed_hosts=127.0.0.1:8791",
        ),
        (listed("a\tno", "b\taddress"), "line 1 has 'no' as its URL"),
        (listed("caption\tone", "http://x/1.jpg\tb", "http://x/2.jpg\tc"), "list.tsv:2: the URL is before the tab"),
        (listed(f"a\thttp://user:secret@{closed_port()}/?key=secret"), "bad_url"),
        (image_that_is_html, "not_image"),
    ],
)
def test_a_collection_without_an_image_fails_and_commits_nothing(
    origin: Callable[[Path], list[str]], named: str, tmp_path: Path
):
    arguments = [str(tmp_path / "root"), "captions", *origin(tmp_path)]
    for _ in range(2):  # a rerun finds nothing done
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert named in ended.value.code  # a string: printed to stderr, and the exit status is 1
        assert "secret" not in ended.value.code
        assert list(of(str(tmp_path / "root")).store.list()) == []


@pytest.mark.parametrize("shards_per_task", [1, 5])
def test_a_shard_without_an_image_waits_for_the_first_image_of_its_dataset(
    shards_per_task: int, web: Web, tmp_path: Path
):
    root, file, name = str(tmp_path / "root"), tmp_path / "list.tsv", f"waits-{shards_per_task}"
    web.put(f"/{name}.jpg", send(encode(draw())))
    lines = [f"a\t/{name}/0", f"b\t/{name}/1", f"c\t/{name}/2", f"d\t/{name}/3"]
    settings = functools.partial(served, web, file, shards_per_task=shards_per_task)
    with pytest.raises(NothingStored, match=r"no row of .* gave an image \(4 http_404\); nothing was committed"):
        collect(root, settings(*lines), lambda line: None)
    assert of(root).shards(IMAGES) == []
    lines.append(f"e\t/{name}.jpg")
    collected = collect(root, settings(*lines), lambda line: None)
    assert (collected.new_shards, collected.counts) == (3, {"http_404": 4, "ok": 1})
    # Once by the run before; whole groups before the first image are asked twice.
    assert {web.asked(f"/{name}/{i}") for i in range(4)} == {3 if shards_per_task == 1 else 2}
    lines += [f"f\t/{name}/6", f"g\t/{name}/7"]
    assert collect(root, settings(*lines), lambda line: None).new_shards == 1
    assert statuses(root) == 4 * ["http_404"] + ["ok"] + 2 * ["http_404"]


def test_only_regular_files_of_a_folder_are_read(tmp_path: Path):
    folder, elsewhere = tmp_path / "images", tmp_path / "elsewhere.jpg"
    folder.mkdir()
    elsewhere.write_bytes(encode(draw()))
    os.mkfifo(folder / "a-fifo.jpg")
    (folder / "b-device.jpg").symlink_to("/dev/zero")
    (folder / "c-gone.jpg").symlink_to(tmp_path / "nowhere")
    (folder / "d-folder.jpg").mkdir()
    (folder / "e-link.jpg").symlink_to(elsewhere)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "f.jpg"))
        command = [sys.executable, "-m", "storage.collect", str(tmp_path / "root"), "captions", f"images={folder}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=PROJECT)
    assert (done.returncode, done.stderr) == (0, "")
    assert statuses(str(tmp_path / "root")) == 4 * ["missing_file"] + ["ok", "missing_file"]


SECRET = "s3cr3t"


def test_no_detail_and_no_log_has_passwords_or_keys_of_urls(web: Web, tmp_path: Path, capsys: pytest.CaptureFixture):
    ways = {
        "gone": send(b"", 404, **{"X-Note": SECRET}),
        "page": send(b"<html>"),
        "loop": send(b"", 302, Location=f"/loop?key={SECRET}"),
        "away": send(b"", 302, Location=f"http://me:{SECRET}@example.com/?key={SECRET}"),
        "junk": send(b"", 302, Location=f"http://[::1?key={SECRET}"),
        "wall": send(b"", 302, Location=f"http://10.0.0.1/?key={SECRET}"),
        "raw": raw(b"this is no HTTP\r\n\r\n"),
        "short": send(b"1234", length=9),
        "silent": silent(20),
        "echo": raw(f"HTTP/1.1 403 see http://x/?key={SECRET}\r\nContent-Length: 0\r\n\r\n".encode()),
        "fine": send(encode(draw())),
    }
    urls = [web.put(f"/{name}?key='{SECRET}'&token={SECRET}", answer) for name, answer in ways.items()]
    web.put(f"/loop?key={SECRET}", ways["loop"])
    urls += [
        f"http://me:{SECRET}@{web.host}/gone",
        f"http://me:p/{SECRET}@{web.host}/gone",
        f"http://me:{SECRET}\N{FULLWIDTH COMMERCIAL AT}{web.host}/gone",
        f"http://{web.host}:port/?key={SECRET}",
        f"ftp://me:{SECRET}@{web.host}/?key={SECRET}",
        f"https://{web.host}/?X-Amz-Signature={SECRET}",
        f"http://{closed_port()}/?key={SECRET}",
        f"http://{web.host}/a\\b?key={SECRET}",
    ]
    file, root = tmp_path / "list.tsv", str(tmp_path / "root")
    command = [sys.executable, "-m", "storage.collect", root, "captions", f"captions={file}"]
    command += [f"download.allowed_hosts={web.host}", "download.deadline=3", "download.read_timeout=1"]
    command += ["download.retries=0", "download.second_pass=0", "report_every=0"]

    file.write_text("".join(f"caption {i}\t{url}\n" for i, url in enumerate(urls)))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    (table,) = of(root).columns(IMAGES, ["status", "detail", "url"])
    assert table["url"].to_pylist() == urls  # what the list has is the key of the row
    assert {"http_404", "bad_url", "timeout", "short_body", "bad_response", "not_image", "ok"} <= {
        *table["status"].to_pylist()
    }
    assert [detail for detail in table["detail"].to_pylist() if SECRET in detail] == []
    file.write_text(f"caption http://me:{SECRET}@host/?key={SECRET}\n")
    with pytest.raises(SystemExit) as ended:
        main(command[3:])
    assert "list.tsv:1: no tab in 'caption http://host/?" in ended.value.code
    assert SECRET not in ended.value.code + "".join(capsys.readouterr())
    file.write_text("".join(f"caption\thttp://127.0.0.{i}:9/{i}?key={SECRET}\n" for i in range(1, 7)))
    command[4:5] = ["unreachable"]
    command.append("download.allowed_hosts=" + ",".join(f"127.0.0.{i}:9" for i in range(1, 7)))
    with pytest.raises(SystemExit) as ended:
        main(command[3:])
    assert "the first http://127.0.0.1:9/1?" in ended.value.code
    assert SECRET not in ended.value.code + "".join(capsys.readouterr())


_WORD = st.text("abcXYZ019._~-", min_size=1, max_size=12)


@given(_WORD, _WORD, _WORD, st.text("abc/é;=%[]'", max_size=12))
@settings_of_examples(max_examples=200, deadline=None, derandomize=True)
def test_a_url_is_shown_with_its_host_and_without_its_secrets(user: str, host: str, path: str, password: str):
    secret = f"{password}{SECRET}"
    for url in (
        f"http://{user}:{secret.replace('/', '')}@{host}/{path}?key={secret}#{secret}",
        f"HTTPS://{host}:80/{path}?{secret}",
        f"//{user}:{secret.replace('/', '')}@{host}/{path}",
        f"http://{user}:at@{secret.replace('/', '')}@{host}/{path}",
    ):
        assert SECRET not in shown_url(url)
        assert f"{host}" in shown_url(url)
        assert path in shown_url(url)
    assert SECRET not in redacted(f"Cannot connect to http://{host}/{path}?key={SECRET} [none], nor /x?{user}={SECRET}")
    plain = f"http://{host}/{path}.jpg"
    assert shown_url(plain) == redacted(plain) == plain


def as_it_is(root: str) -> dict[str, bytes]:
    """Every object of a root."""
    store = open_store(root)
    return {info.path: store.get(info.path) for info in store.list()}


def test_rows_of_committed_shards_are_requested_again_by_their_status(web: Web, tmp_path: Path):
    root, file, image = str(tmp_path / "root"), tmp_path / "list.tsv", encode(draw(seed=3))
    web.put("/again/once.jpg", send(image))
    web.put("/again/later.jpg", in_turn(send(b"", 503), send(image)))
    web.put("/again/never.jpg", send(b"", 502))
    lines = [
        f"{c}\t/again/{name}.jpg"
        for c, name in zip("abcdef", ("once", "later", "gone", "once", "never", "once"), strict=True)
    ]
    lines.append(lines[0])
    settings = served(web, file, *lines, rows_per_shard=3, download=dataclasses.replace(
        served(web, file, *lines).download, second_pass=0
    ))  # fmt: skip
    collect(root, settings, lambda line: None)
    before, old = as_it_is(root), of(root).pin(IMAGES)
    assert statuses(root) == ["ok", "http_503", "http_404", "ok", "http_502", "ok", "duplicate"]
    read = lambda: [sample.caption for shard in of(root).shards(IMAGES) for sample in of(root).read(IMAGES, shard)]  # noqa: E731
    assert read() == ["a", "d", "f"]
    said, asked = [], len(web.requests)
    again = dataclasses.replace(settings, retry_statuses=("http_5xx", "timeout"))
    collected = collect(root, again, said.append)
    assert [path for _, path, _ in web.requests[asked:]].count("/again/later.jpg") == 1
    assert {path for _, path, _ in web.requests[asked:]} == {"/again/later.jpg", "/again/never.jpg"}
    assert (collected.retried_rows, collected.newly_ok, collected.new_shards) == (2, 1, 0)
    assert "captions: 2 rows of 2 shards are requested again: http_5xx, timeout" in said
    assert statuses(root) == ["ok", "ok", "http_404", "ok", "http_502", "ok", "duplicate"]
    assert read() == ["a", "b", "d", "f"]
    assert as_it_is(root).items() > before.items()  # nothing that was there has changed
    assert {path for path in as_it_is(root).keys() - before.keys() if path.endswith(".parquet")} == {
        "captions/images/00000.r2.parquet",  # 00001 is as it was, so no revision of it is written
        f"captions/images/snapshots/{old.id}.parquet",
    }
    new, index = of(root).pin(IMAGES), of(root).pinned(IMAGES, old.id)
    assert (old.ok_rows, new.ok_rows) == (3, 4)
    assert len(index.keys()) == 3
    assert list(verify(Inventory(open_store(root)))) == []
    pin = {"dataset": "captions", "stage": IMAGES, "snapshot": old.id}
    put_checkpoint(open_store(root), "runs/run/step-0000001", {"held_out": pin})
    assert collect_garbage(open_store(root), -60, delete=True) == ["nothing to delete"]  # the run pins the old tar
    collected = collect(root, again, said.append)
    assert (collected.retried_rows, collected.newly_ok) == (1, 0)
    assert of(root).headers(IMAGES)["00000"].revision == 2
    for path in (index.tars[0], "captions/images/00000.parquet"):  # which the revision left as they were
        file = tmp_path / "root" / path
        whole = file.read_bytes()
        file.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
        assert any(str(file) in fault for fault in verify(Inventory(open_store(root))))
        file.write_bytes(whole)
    assert list(verify(Inventory(open_store(root)))) == []


def test_rows_whose_host_cannot_be_reached_again_keep_their_results(web: Web, tmp_path: Path):
    root, file = str(tmp_path / "root"), tmp_path / "list.tsv"
    web.put("/keeps.jpg", send(encode(draw())))
    with Web("127.0.0.4") as gone:
        download = DownloadSettings(deadline=2, retries=0, second_pass=0, allowed_hosts=(web.host, gone.host))
        lines = ["a\t/keeps.jpg", *(f"b\t{gone.url(f'/{i}.jpg')}" for i in range(20))]
        settings = served(web, file, *lines, rows_per_shard=21, download=download)
        collect(root, settings, lambda line: None)
    before = as_it_is(root)
    assert {*statuses(root)[1:]} == {"http_404"}
    collected = collect(root, dataclasses.replace(settings, retry_statuses=("http_4xx",)), lambda line: None)
    assert (collected.retried_rows, collected.newly_ok) == (20, 0)
    assert as_it_is(root) == before


def test_a_list_that_is_edited_while_it_is_collected_is_an_error(web: Web, tmp_path: Path):
    web.put("/edited.jpg", send(encode(draw())))
    file, root = tmp_path / "list.tsv", str(tmp_path / "root")
    lines = [f"caption {i}\t/edited.jpg" for i in range(6)]
    settings = served(web, file, *lines, shards_per_task=1)

    def edit(at: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        if group.parts[0].shard == "00001":
            served(web, file, "a new line\t/edited.jpg", *lines)
        return collect_group(at, settings, group, on_commit, lambda line: None)

    message = r"list.tsv was changed while it was collected: rows 2 to 4 \(shard 00001\)"
    with pytest.raises(ValueError, match=message):
        collect(root, settings, lambda line: None, edit)
    assert of(root).shards(IMAGES) == ["00000"]


def test_a_folder_that_is_changed_while_it_is_imported_is_an_error(demo_data: DemoData, tmp_path: Path):
    folder, root = shutil.copytree(demo_data.task_images, tmp_path / "images"), str(tmp_path / "root")

    def change(at: str, settings: CollectSettings, group: Group, on_commit: OnCommit) -> dict[str, int]:
        (folder / "000.jpg").write_bytes(b"")
        return collect_group(at, settings, group, on_commit)

    settings = dataclasses.replace(refcoco(demo_data), images=str(folder))
    with pytest.raises(ValueError, match="images was changed while it was collected: rows 0 to 6"):
        collect(root, settings, lambda line: None, change)


def test_rows_are_read_where_their_part_begins(web: Web, tmp_path: Path):
    file = tmp_path / "list.tsv"
    file.write_bytes("é\thttp://x/0\r\nb\thttp://x/1\nc\thttp://x/2".encode())
    parts = plan(CollectSettings("captions", captions=str(file), rows_per_shard=1), {})
    assert [part.offset for part in parts] == [0, 15, 28]


def test_a_download_from_the_open_web_without_a_contact_warns(tmp_path: Path):
    file = tmp_path / "list.tsv"
    file.write_text("a\tno address\n")

    def said(name: str, **changes: object) -> list[str]:
        lines = []
        settings = CollectSettings("captions", captions=str(file), download=DownloadSettings(**changes))
        with pytest.raises(NothingStored):
            collect(str(tmp_path / name), settings, lines.append)
        return [line for line in lines if "warning" in line]

    (warning,) = said("none")
    assert "no contact is set" in warning
    assert "download.contact" in warning
    assert said("contact", contact="tests@example.org") == []
    assert said("own", allowed_hosts=("127.0.0.1:1",)) == []


def test_images_of_shards_in_progress_are_on_disk_and_not_in_memory(web: Web, tmp_path: Path):
    # A comment that is stored as it came makes the files large and cheap to check.
    large = encode(draw())
    large = large[:2] + 60 * (b"\xff\xfe\xff\xff" + bytes(65533)) + large[2:]
    lines = [f"caption {i}\t{web.put(f'/large/{i}.jpg', send(large))}" for i in range(25)]
    settings = served(web, tmp_path / "list.tsv", *lines, rows_per_shard=25)
    code = (
        "import resource, sys; import storage.collect as c; from storage.download import DownloadSettings;"
        "import aiohttp, PIL.Image, simplejpeg, pyarrow.parquet, tarfile;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"s = c.CollectSettings('captions', captions={settings.captions!r}, rows_per_shard=25, download="
        f"DownloadSettings(allowed_hosts=({web.host!r},), per_host=2, concurrency=2));"
        f"print(c.collect({str(tmp_path / 'root')!r}, s, lambda line: None).counts);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    counts, grown = done.stdout.splitlines()
    assert counts == "{'ok': 25}"
    assert len(large) * 25 > 95_000_000
    assert int(grown) * 1024 < 60_000_000


def test_shards_in_progress_share_the_state_of_a_host(tmp_path: Path):
    with Web("127.0.0.1") as good, Web("127.0.0.2") as hanging:
        lines = []
        for number in range(24):  # six shards, each with two rows of either
            server, answer = (good, send(encode(draw()))) if number % 2 else (hanging, silent(20))
            lines.append(f"caption {number}\t{server.put(f'/{number}.jpg', answer)}")
        download = DownloadSettings(
            deadline=20, read_timeout=1.2, retries=0, second_pass=0, allowed_hosts=(good.host, hanging.host)
        )
        settings = served(good, tmp_path / "list.tsv", *lines, rows_per_shard=4, download=download)
        collected = collect(str(tmp_path / "root"), settings, lambda line: None)
    # Two at first, and at the end one more for shards that end together.
    assert collected.counts["ok"] == 12
    assert 2 <= collected.counts["timeout"] <= 6
    assert collected.counts["host_timeout"] == 12 - collected.counts["timeout"]
    assert all(hanging.asked(f"/{number}.jpg") for number in range(0, 24, 2))


def test_a_shard_that_another_process_commits_meanwhile_is_skipped(web: Web, tmp_path: Path):
    root, image = str(tmp_path / "root"), encode(draw())
    started, other_done = threading.Barrier(SHARDS_AT_ONCE + 1), threading.Event()

    def held(handler: BaseHTTPRequestHandler) -> None:
        started.wait(30)
        other_done.wait(30)
        send(image)(handler)

    urls = [web.put(f"/shared/{i}.jpg", in_turn(held, send(image))) for i in range(SHARDS_AT_ONCE)]
    urls += [web.put("/shared/last.jpg", send(image))]
    download = DownloadSettings(deadline=60, read_timeout=50, allowed_hosts=(web.host,), breaker=9)
    lines = [f"caption {i}\t{url}" for i, url in enumerate(urls)]
    settings = served(web, tmp_path / "list.tsv", *lines, rows_per_shard=1, download=download)
    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(collect, root, settings, lambda line: None)
        started.wait(30)  # all shards but the last are in progress
        quick = collect(root, settings, lambda line: None)
        other_done.set()
    assert (quick.new_shards, late.result().new_shards) == (6, 0)
    assert quick.counts == late.result().counts == {"ok": 6}
    assert web.asked("/shared/0.jpg") == 2
    assert web.asked("/shared/last.jpg") == 1


LIST = {"captions": "a.tsv"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"captions": "a.tsv", "images": "folder"}, "set captions .* or images"),
        ({}, "set captions .* or images"),
        ({"images": "folder", "img2dataset": "folder"}, "set captions .* or images .* or img2dataset"),
        (LIST | {"rows_per_shard": 0}, "rows_per_shard is 0"),
        (LIST | {"shards_per_task": 0}, "shards_per_task is 0"),
        (LIST | {"report_every": -1}, "report_every is -1"),
        (LIST | {"save_every": 0}, "save_every is 0"),
        *(
            (LIST | {"retry_statuses": ("dns", name)}, f"retry_statuses names '{name}', must be of bad_url, .*http_5xx")
            for name in ("ok", "duplicate", "http_6xx", "http_", "slow")
        ),
        ({"images": "folder", "retry_statuses": ("missing_file",)}, "retry_statuses is for a list of captions"),
    ],
)
def test_settings_are_refused_by_dataset_and_field(settings: dict[str, object], named: str):
    with pytest.raises(ValueError, match=f"Dataset x: {named}"):
        CollectSettings("x", **settings)


def test_the_program_collects_and_goes_on_where_it_was(web: Web, tmp_path: Path):
    web.put("/program.jpg", send(encode(draw(600, 300))))
    served(web, tmp_path / "list.tsv", "a\t/program.jpg", "b\t/gone.jpg", "c\t/program.jpg")
    command = [sys.executable, "-m", "storage.collect", str(tmp_path / "root"), "captions"]
    command += [f"captions={tmp_path / 'list.tsv'}", "rows_per_shard=2", f"download.allowed_hosts={web.host}"]
    command += ["download.max_side=300", "download.deadline=5", "download.contact=tests@example.org", "report_every=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"captions: 2 of 2 shards to collect, 3 rows in {tmp_path / 'list.tsv'}"
    assert any(line.startswith("captions: 3 of 3 rows: 2 ok, 1 http_404; ") for line in lines)
    assert lines[-1].startswith("captions: 2 new of 2 shards in ")
    assert lines[-1].endswith(" s; all rows: 1 http_404, 2 ok") or lines[-1].endswith(" s; all rows: 2 ok, 1 http_404")
    assert {sample.width for sample in of(str(tmp_path / "root")).read(IMAGES, "00000")} == {300}
    assert "tests@example.org" in web.requests[-1][2]["User-Agent"]


@pytest.mark.parametrize("ready", ["no images yet", "a whole shard of images"])
def test_on_a_full_disk_the_program_says_what_is_full_and_the_way_out(ready: str, web: Web, tmp_path: Path):
    large = encode(draw())
    large = large[:2] + 2 * (b"\xff\xfe\xff\xff" + bytes(65533)) + large[2:]
    web.put("/large.jpg", send(large))
    rows = 1 if ready == "a whole shard of images" else 4
    settings = served(web, tmp_path / "list.tsv", *(f"caption {i}\t/large.jpg?{i}" for i in range(rows)))
    for i in range(rows):
        web.put(f"/large.jpg?{i}", send(large))
    # No file may be larger than this: enough for one image, and too little for a tar of it, or for four of them.
    limit = (len(large) + 512) // 1024 + (0 if rows == 1 else 1)
    program = f"{sys.executable} -m storage.collect {tmp_path}/root captions captions={settings.captions}"
    program += f" rows_per_shard={rows} download.allowed_hosts={web.host} download.retries=0 download.second_pass=0"
    command = ["bash", "-c", f"ulimit -f {limit + 1}; export TMPDIR={tmp_path}; exec {program}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert f" in {tmp_path}" in done.stderr
    assert "et TMPDIR to a folder with more space" in done.stderr
    assert "please report" not in done.stderr
    assert done.stderr.count("\n") == 1
    assert of(str(tmp_path / "root")).shards(IMAGES) == []


def test_ctrl_c_ends_the_program_with_one_line(web: Web, tmp_path: Path):
    asked = threading.Event()

    def wait(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        handler.server.stopping.wait(20)

    settings = served(web, tmp_path / "list.tsv", f"a\t{web.put('/wait.jpg', wait)}")
    command = [sys.executable, "-m", "storage.collect", str(tmp_path / "root"), "captions"]
    command += [f"captions={settings.captions}", f"download.allowed_hosts={web.host}"]
    root = PROJECT
    # Under nohup, or in the background of a script, it would not heed SIGINT.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root, preexec_fn=heeds)
    try:
        assert asked.wait(60)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130
    assert said == "stopped; what is committed stays, and the same command goes on from there\n"


def partials(catalog: Catalog) -> list[str]:
    """The objects of shards in progress."""
    return [info.path for info in catalog.store.list("captions/images/partial/")]


def test_a_killed_collection_has_lost_only_what_came_since_the_last_save(web: Web, catalog: Catalog, tmp_path: Path):
    good = [f"/kill/{i}.jpg" for i in range(20)]
    for i, path in enumerate(good):
        web.put(path, send(encode(draw(seed=i))))
    slow = [f"/kill/slow{shard}.jpg" for shard in range(2)]  # without it, each shard would be done
    for path in slow:
        web.put(path, silent(60))
    lines = [f"caption {path}\t{path}" for path in (*good[:10], slow[0], *good[10:], slow[1])]
    settings = served(web, tmp_path / "list.tsv", *lines)
    command = [sys.executable, "-m", "storage.collect", catalog.store.where(), "captions", "rows_per_shard=11"]
    command += [f"captions={settings.captions}", f"download.allowed_hosts={web.host}"]
    command += ["save_every=0.2", "download.breaker=9"]
    root = PROJECT
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=root)

    def saved(shard: str) -> int:
        prefix = f"captions/images/partial/{shard}-"
        found = [catalog.store.get(info.path) for info in catalog.store.list(prefix)]
        return sum(pq.read_metadata(io.BytesIO(data)).num_rows for data in found)

    try:
        end = time.monotonic() + 60
        while (saved("00000"), saved("00001")) != (10, 10):
            assert running.poll() is None, "the collection ended by itself"
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        running.kill()
        running.wait()
    assert catalog.shards(IMAGES) == []
    asked = len(web.requests)
    for path in slow:
        web.put(path, send(encode(draw())))
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "captions: shard 00001 continues with 10 images from an earlier run" in done.stdout
    assert sorted(path for _, path, _ in web.requests[asked:]) == slow
    for shard, paths in (("00000", good[:10]), ("00001", good[10:])):
        assert catalog.manifest(IMAGES, shard).table["status"].to_pylist() == 11 * ["ok"]
        images = [sample.image for sample in catalog.read(IMAGES, shard)]
        assert images[:10] == [encode(draw(seed=good.index(path))) for path in paths]
    assert partials(catalog) == []


def test_images_are_saved_while_another_shard_is_being_committed(web: Web, tmp_path: Path, monkeypatch):
    web.put("/while/slow.jpg", silent(10))  # its shard is in progress meanwhile
    for name in "abc":
        web.put(f"/while/{name}.jpg", send(encode(draw(seed=ord(name)))))
    lines = [f"caption\t/while/{name}.jpg" for name in ("a", "b", "c", "slow")]
    settings = served(web, tmp_path / "list.tsv", *lines, save_every=0.1)
    root, seen = str(tmp_path / "root"), []

    def slow_commit(*arguments: object, **options: object) -> bool:
        end = time.monotonic() + 10
        while not partials(of(root)) and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(partials(of(root)))
        return commit_images(*arguments, **options)

    monkeypatch.setattr("storage.collect.commit_images", slow_commit)
    collect(root, settings, lambda line: None)
    assert any("/00001-" in path for path in seen[0])


def test_a_shard_in_progress_is_saved_in_several_objects_and_read_back(catalog: Catalog, monkeypatch):
    monkeypatch.setattr("storage.spool._OBJECT_BYTES", 1000)

    def lost(*_: object) -> None:
        raise StorageUnreachable("away")

    shard = functools.partial(PartialShard, catalog.store, "captions", "00007")
    images = {
        f"http://x/{i}": NormalisedImage(bytes([i]) * 300, i, 2, f"{i:064}", ("png",) * (i % 2)) for i in range(10)
    }
    with Spool() as spool, Spool() as again:

        def read_back(settings: str) -> dict[str, NormalisedImage]:
            found = shard(settings).load(again)
            names = [field.name for field in dataclasses.fields(NormalisedImage)]
            return {url: NormalisedImage(*(getattr(saved, name) for name in names)) for url, saved in found.items()}

        first, other, second = shard("a" * 12), shard("b" * 12), shard("a" * 12)
        for url, image in images.items():
            first.add(url, spool.write(image))
        with monkeypatch.context() as away:
            away.setattr(catalog.store, "put", lost)
            with pytest.raises(StorageUnreachable):
                first.save()
        first.save()  # all of it, though the storage was away
        first.save()  # nothing new
        assert len(partials(catalog)) == 3
        assert read_back("a" * 12) == images
        assert read_back("b" * 12) == {}  # other settings make other bytes
        damaged = partials(catalog)[0]
        catalog.store.put(damaged, catalog.store.get(damaged)[:-1])
        assert 0 < len(read_back("a" * 12)) < 10
        for one in (other, second):
            one.add("http://x/1", spool.write(images["http://x/1"]))
            one.save()
        assert len(partials(catalog)) >= 4
        remove_partial(catalog.store, "captions", {"00001"})
        assert len(partials(catalog)) >= 4
        assert [one.what for one in find_garbage(catalog.store, grace=-1)] == len(partials(catalog)) * ["partial shard"]
        assert find_garbage(catalog.store, grace=3600) == []
        first.close()  # of whoever it was, and with whatever settings
        assert partials(catalog) == []
        first.add("http://x/2", spool.write(images["http://x/2"]))
        first.save()
        assert partials(catalog) == []
        second.add("http://x/2", spool.write(images["http://x/2"]))
        second.save()
        remove_partial(catalog.store, "captions", {"00007"})
        assert partials(catalog) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["captions=nowhere.tsv"], "No such file or directory: 'nowhere.tsv'"),
        (["images=nowhere"], "nowhere is not a folder"),
        (["captions=nowhere.tsv", "download.deadline=0"], "DownloadSettings.deadline is 0"),
        (["captions=nowhere.tsv", "download.retry=1"], "DownloadSettings has no field 'retry'; it has max_bytes,"),
        (["captions=nowhere.tsv", "name=another"], "CollectSettings has no field 'name'; it has captions,"),
        (["captions=nowhere.tsv", "rows_per_shard=few"], "rows_per_shard=few: 'few' is no int"),
        (["captions=nowhere.tsv", "commit_unreachable=yes"], "commit_unreachable=yes: it must be true or false"),
        (["nowhere.tsv"], "'nowhere.tsv' has no '='"),
        (["captions=nowhere.tsv", "download.allowed_hosts=localhost"], "'localhost' is not host:port"),
    ],
)
def test_the_program_ends_with_one_clear_line(arguments: list[str], message: str, tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "root"), "captions", *arguments])
    assert message in ended.value.code  # a string: printed to stderr, and the exit status is 1
    assert "\n" not in ended.value.code
