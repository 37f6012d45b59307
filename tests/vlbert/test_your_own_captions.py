"""docs/your-own-captions.md: from twenty images with captions to a checkpoint."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import run_commands

from demo.data import DemoData

PAGE = "your-own-captions.md"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def photos(demo_data: DemoData, tmp_path: Path) -> Iterator[int]:
    """Twenty images in photos/ with their captions.tsv, given out as http.server does; the port."""
    handler = functools.partial(Quiet, directory=str(tmp_path / "photos"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    (tmp_path / "photos").mkdir()
    lines = []
    rows = [line.split("\t") for line in demo_data.train_tsv.read_text().splitlines()]
    whole = [row for row in rows if "/images/" in row[1]][:20]  # the others are broken on purpose
    for number, (caption, url) in enumerate(whole, 1):
        image = demo_data.images / url.rpartition("/")[2]
        (tmp_path / f"photos/{number:04d}.jpg").write_bytes(image.read_bytes())
        lines.append(f"{caption}\thttp://127.0.0.1:{server.server_port}/{number:04d}.jpg\n")
    (tmp_path / "captions.tsv").write_text("".join(lines))
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_checkpoint_that_answers(photos, tmp_path, monkeypatch, capsys):
    replaced = {"http.server 8000": "http.server", ":8000": f":{photos}", "steps=200": "steps=4"}
    ran = run_commands(PAGE, tmp_path, monkeypatch, replaced, passed_over=["http.server"])
    assert ran.count("storage.collect") == ran.count("detectors.run") == 2
    lines = (tmp_path / "my-root/runs/pretrain_vlbert_demo/metrics.jsonl").read_text().splitlines()
    (validation,) = [line for line in map(json.loads, lines) if line["kind"] == "validation"]
    assert {"words_accuracy", "words_accuracy_shuffled"} <= validation.keys()
    printed = capsys.readouterr().out
    assert "captions: 1 new of 1 shards" in printed
    assert "all rows: 16 ok" in printed
    assert "all rows: 4 ok" in printed
    assert (tmp_path / "photos/0001-answer.png").is_file()
