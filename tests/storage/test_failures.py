"""`vlbert failures`: which rows have no image or no regions, where they are in the list, why, and what helps."""

import csv
import io
from pathlib import Path

import pytest
from web import Web, draw, encode, send

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.collect.failures import main
from storage.collect.run import main as collect_main
from storage.manifests import Row
from storage.object_store import open_store


def failures(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    capsys.readouterr()
    main([*map(str, arguments)])
    return capsys.readouterr().out


def collected(capsys: pytest.CaptureFixture, web: Web, *arguments: object) -> str:
    capsys.readouterr()
    more = ["--download.allowed_hosts", web.host, "--rows_per_shard", "2"]
    collect_main([*map(str, arguments), *more])
    return capsys.readouterr().out


@pytest.mark.parametrize("form", ["tsv", "csv"])
def test_each_failed_row_has_its_line_url_reason_and_hint(web: Web, tmp_path: Path, capsys, form: str):
    ok, gone = web.put("/ok.jpg", send(encode(draw()))), f"http://{web.host}/{form}.jpg?signed=1"
    web.put("/page.jpg", send(b"<html>"))
    rows = [(ok, "a"), (gone, "b"), (ok, "a"), (f"http://{web.host}/page.jpg", "c"), ("nonsense", "d"), (gone, "e")]
    file, root, join = tmp_path / f"list.{form}", tmp_path / "root", {"tsv": "\t", "csv": ","}[form].join
    lines = ["url" + join(["", "caption"]), *map(join, rows), join(["x"] * 3) if form == "csv" else ""]
    file.write_text("\n".join(lines[: 7 + (form == "csv")]) + "\n")
    printed = collected(capsys, web, root, "captions", "--captions", file).splitlines()
    place = {"tsv": "list.tsv:{}", "csv": "list.csv, row {}"}[form].format
    # One example of each status ends what a collection prints.
    for status, line, said in (
        ("http_404", 3, f"/{form}.jpg?…: HTTP 404"),
        ("bad_url", 6, "nonsense"),
        ("duplicate", 4, ""),
    ):
        (example,) = (one for one in printed if one.startswith(f"{status}, such as {place(line)}: "))
        assert said in example
    assert printed[-1] == f"vlbert failures {root} captions lists all of them"

    listed = list(csv.DictReader(io.StringIO(failures(capsys, root, "captions", "--csv"))))
    expected = {3: "http_404", 4: "duplicate", 5: "not_image", 6: "bad_url", 7: "http_404"}
    expected |= {8: "bad_row"} if form == "csv" else {}
    assert [(row["location"], row["status"]) for row in listed] == [(place(n), s) for n, s in expected.items()]
    assert all(lines[n - 1].startswith(row["url"]) for n, row in zip(expected, listed, strict=True))
    assert all(row["reason"] and row["hint"] for row in listed)
    assert listed[0]["hint"] == "--retry_statuses http_404 tries again"
    assert listed[1]["reason"] == f"of {place(2)}"

    chosen = failures(capsys, root, "captions", "--status", "http_4xx").splitlines()
    assert chosen[0] == "images, http_404, 2 rows; --retry_statuses http_404 tries again"
    assert [line.split(": ")[0] for line in chosen[1:]] == [f"  {place(n)}" for n in (3, 7)]
    assert "signed" not in "".join(chosen)
    assert failures(capsys, root, "captions", "--status", "dns") == "captions: no such rows\n"
    with pytest.raises(SystemExit, match="no row of captions has the status 'http404'; there are .*http_404"):
        main([str(root), "captions", "--status", "http404"])

    # The hints lead out.
    web.put(f"/{form}.jpg?signed=1", send(encode(draw(seed=1))))
    with file.open("a") as out:
        out.write(join((ok, "corrected")) + "\n")
    collected(capsys, web, root, "captions", "--captions", file, "--retry_statuses", "http_404")
    assert [row["status"] for row in csv.DictReader(io.StringIO(failures(capsys, root, "captions", "--csv")))] == [
        status for status in expected.values() if status != "http_404"
    ]
    assert Catalog(open_store(str(root)), "captions").counts("images")["ok"] == 4


def test_images_without_regions_are_failures_too(web: Web, tmp_path: Path, capsys):
    root, url = tmp_path / "root", web.put("/a.jpg", send(encode(draw())))
    (tmp_path / "list.tsv").write_text(f"one\t{url}\n")
    collected(capsys, web, root, "captions", "--captions", tmp_path / "list.tsv")
    catalog = Catalog(open_store(str(root)), "captions")
    key = next(catalog.read("images", "00000")).key
    rows = [Row(0, key, "no_features", "no row of x.tsv names a.jpg", url)]
    assert commit_shard(catalog, "regions/imported-0", "00000", [], rows, {})
    assert failures(capsys, root, "captions").splitlines() == [
        "regions/imported-0, no_features, 1 rows; docs/detector.md explains it",
        f"  list.tsv:1: {url}: no row of x.tsv names a.jpg",
    ]


def test_a_dataset_that_does_not_exist_is_named(web: Web, tmp_path: Path):
    (tmp_path / "list").mkdir()
    with pytest.raises(SystemExit, match="captions has no committed shard"):
        main([str(tmp_path), "captions"])
