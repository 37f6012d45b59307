"""docs/your-own-captions.md: from twenty images with captions to a checkpoint."""

import csv
import io
import json
import unicodedata

import pytest
from guides import run_commands
from web import draw, encode

from demo.data import DemoData
from storage.catalog import Catalog
from storage.object_store import open_store
from storage.safe_json import printable
from vlbert.commands import main

PAGE = "your-own-captions.md"


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_checkpoint_that_answers(demo_data: DemoData, tmp_path, monkeypatch, capsys):
    (tmp_path / "photos").mkdir()
    rows, lines = [line.split("\t") for line in demo_data.train_tsv.read_text().splitlines()], []
    whole = [row for row in rows if "/images/" in row[1]][:20]  # the others are broken on purpose
    for number, (caption, url) in enumerate(whole, 1):
        image = demo_data.images / url.rpartition("/")[2]
        (tmp_path / f"photos/{number:04d}.jpg").write_bytes(image.read_bytes())
        lines.append(f"{caption}\t{number:04d}.jpg\n")
    (tmp_path / "captions.tsv").write_text("".join(lines))
    ran = run_commands(PAGE, tmp_path, monkeypatch, {"--data.text_batch 0": "--data.text_batch 0 --steps 4"})
    assert ran.count("storage.collect.run") == ran.count("detectors.run") == 2
    lines = (tmp_path / "my-root/runs/pretrain_vlbert_demo/metrics.jsonl").read_text().splitlines()
    (validation,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    assert {"words_accuracy", "words_accuracy_shuffled"} <= validation.keys()
    printed = capsys.readouterr().out
    assert "captions: 1 new of 1 shards" in printed
    assert "all rows: 16 ok" in printed
    assert "all rows: 4 ok" in printed
    assert (tmp_path / "0001-answer.png").is_file()
    assert not (tmp_path / "photos/0001-answer.png").exists(), "it would be an image of the next collection"


@pytest.mark.slow
def test_a_messy_list_goes_from_its_rows_to_an_answer(tmp_path, monkeypatch, capsys):
    """A CSV of Excel (UTF-16, semicolons, quotes, line ends in cells) for images of all kinds, some unusable."""
    photos, upright = tmp_path / "photos", draw(96, 64)
    (photos / "sub").mkdir(parents=True)
    exif = upright.getexif()
    exif[0x0112] = 6
    files = {
        "plain.jpg": encode(upright),
        "deep.png": encode(upright.convert("I;16"), "PNG"),
        "moving.gif": encode(upright, "GIF", save_all=True, append_images=[draw(96, 64, seed=1)]),
        "scan.tif": encode(upright, "TIFF"),
        "new.avif": encode(upright, "AVIF"),
        "phone.heic": encode(upright, "HEIF"),
        "print.jpg": encode(upright.convert("CMYK")),
        "turned.jpg": encode(upright, exif=exif),
        unicodedata.normalize("NFD", "café.jpg"): encode(upright),
        "sub/park.jpg": encode(upright),
        "page.jpg": b"<!doctype html><title>moved</title>",
        "half.jpg": encode(upright)[:700],
        "photo of \u202f.jpg": encode(upright),
    }
    for name, data in files.items():
        (photos / name).write_bytes(data)
    long = " ".join(700 * ["red"])
    rows = {  # file name -> caption and status
        "plain.jpg": ('a "red" star; and a ring', "ok"),
        "deep.png": ("a line\nand another", "ok"),
        "moving.gif": (long, "ok"),
        "scan.tif": ("ein grüner Kreis 🟢", "ok"),
        "new.avif": ("a star", "ok"),
        "phone.heic": ("a\ttab", "ok"),
        "print.jpg": ("\u202fa ring\xa0", "ok"),
        "turned.jpg": ("a cross", "ok"),
        unicodedata.normalize("NFC", "café.jpg"): ("a café", "ok"),
        "sub\\park.jpg": ("a park", "missing_file"),
        "page.jpg": ("a page", "not_image"),
        "half.jpg": ("a half", "truncated"),
        "photo of \u202f.jpg": ("  ", "empty_caption"),
        "none.jpg": ("no file", "missing_file"),
    }
    text = io.StringIO()
    writer = csv.writer(text, delimiter=";")
    writer.writerows([["file_name", "caption"], *([name, caption] for name, (caption, _) in rows.items())])
    writer.writerows([["plain.jpg", rows["plain.jpg"][0]], ["plain.jpg", ""], []])
    (tmp_path / "list.csv").write_text(text.getvalue(), encoding="utf-16")
    guide = {
        "head -n 16 captions.tsv > train.tsv\ntail -n +17 captions.tsv > val.tsv\n": "",
        "train.tsv": "list.csv",
        "val.tsv": "list.csv",
        "photos/0001.jpg": "photos/turned.jpg",
        "--data.text_batch 0": "--data.text_batch 0 --steps 4",
    }
    run_commands(PAGE, tmp_path, monkeypatch, guide)
    main(["failures", "my-root", "captions"])
    printed = capsys.readouterr().out
    for number, (name, (_, status)) in enumerate(rows.items(), 2):  # line 1 names the columns
        assert (f"list.csv, row {number}: {printable(name)}" in printed) == (status != "ok")
    assert "it is photos/sub/park.jpg" in printed
    cut = (tmp_path / "my-root/runs/pretrain_vlbert_demo/unreadable.jsonl").read_text()
    assert "list.csv, row 4: " in cut
    assert (tmp_path / "turned-answer.png").is_file()
    catalog = Catalog(open_store(str(tmp_path / "my-root")), "captions")
    found = [
        (row["url"], row["status"])
        for table in catalog.columns("images", ["url", "status"])
        for row in table.to_pylist()
    ]
    wanted = [(name, status) for name, (_, status) in rows.items()]
    assert found == [*wanted, ("plain.jpg", "duplicate"), ("plain.jpg", "empty_caption")]
