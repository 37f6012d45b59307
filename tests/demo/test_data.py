"""The demo data: words, boxes and files agree; its server misbehaves as its URLs say."""

import contextlib
import dataclasses
import hashlib
import http.client
import io
import json
import os
import struct
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
from PIL import Image

from demo import data
from demo.data import DemoDataSettings, draw_demo_data, read_demo_data
from demo.serve import DemoServer
from demo.task_files import ANSWERS
from vlbert.datasets import refcoco, vcr, vqa

OF_TASKS = {"task_train": 2, "task_val": 1, "task_test": 2}
TINY = DemoDataSettings(train_scenes=12, held_out_scenes=2, broken_rows=8, text_lines=3, **OF_TASKS)
FILLING = {"the", "one", "shape", "with"}  # words of an expression that say nothing of its object
LOCATION_WORDS = {"left", "right", "top", "bottom", "above", "below", "under", "over", "middle", "center", "next"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> data.DemoData:
    settings = dataclasses.replace(TINY, task_train=40, task_val=15, task_test=30)
    return draw_demo_data(tmp_path_factory.mktemp("data"), settings)


def contents(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


SPLITS = {"train2014": "train", "val2014": "val", "eval2014": "test"}  # of VQA and of VCR


@pytest.fixture(scope="module")
def expressions(drawn: data.DemoData) -> refcoco.Expressions:
    return refcoco.read_expressions(drawn.refcoco)


def test_no_image_is_of_two_splits(drawn, expressions):
    questions = {split: {one.image for one in vqa.read_questions(drawn.vqa, split)} for split in SPLITS}
    items = {split: {one.image for one in vcr.read_items(drawn.vcr / f"{of}.jsonl")} for split, of in SPLITS.items()}
    train, val, test = (questions[split] | items[split] for split in SPLITS)
    assert [train, val, test] == [expressions[split].keys() for split in ("train", "val", "testA")]
    assert not train & val
    assert not (train | val) & test
    assert {file.name for file in drawn.task_images.iterdir()} == train | val | test


def test_an_expression_fits_its_object_and_no_other(drawn, expressions):
    coco = json.loads(drawn.refcoco_instances.read_text())
    categories = {category["id"]: category["name"] for category in coco["categories"]}
    things = {image["file_name"]: [] for image in coco["images"]}
    names = {image["id"]: image["file_name"] for image in coco["images"]}
    for annotation in coco["annotations"]:
        shape = categories[annotation["category_id"]].split()[1]
        things[names[annotation["image_id"]]].append({*annotation["attributes"], shape})
    same, lengths = {"large": "big", "little": "small", "plain": "solid", "stripes": "striped"}, set()
    for name, found in [pair for by_file in expressions.values() for pair in by_file.items()]:
        for one in found:
            words = {same.get(word, word) for word in one.text.split()}
            assert [i for i, thing in enumerate(things[name]) if words - FILLING <= thing] == [one.object], one
            assert not LOCATION_WORDS & words
            lengths.add(len(words - FILLING))
    assert lengths >= {1, 2, 3}


# sha256 of all that is drawn but the images: of words that are true of their scenes. A change of them needs another
# DATA_VERSION.
WORDS = "b7d0ab0ee5ff1d810361e48b3b98d7f51ca0cb39d0a45a678eea9fc3a529cd16"


def test_the_same_settings_give_the_same_bytes(drawn, tmp_path):
    found = contents(drawn.root)
    words = [name.encode() + found[name] for name in sorted(found) if not name.endswith((".jpg", "demo.json"))]
    assert hashlib.sha256(b"".join(words)).hexdigest() == WORDS
    for hash_seed, name in enumerate(("a", "b")):
        fields = [f"--{name}={value}" for name, value in dataclasses.asdict(TINY).items()]
        command = [sys.executable, "-m", "demo.data", str(tmp_path / name), *fields]
        # Another hash seed: no order may come from that of a set.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": str(hash_seed)}, capture_output=True)
    one = contents(tmp_path / "a")
    assert one == contents(tmp_path / "b")
    other = contents(draw_demo_data(tmp_path / "c", dataclasses.replace(TINY, seed=6)).root)
    assert {Path(name).name for name in one if other[name] == one[name]} <= {ANSWERS}, "of so few questions"


def test_data_that_are_there_stay_and_others_are_refused_and_an_interrupted_drawing_is_done_again(tmp_path):
    drawn = draw_demo_data(tmp_path, TINY, 9001)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert draw_demo_data(tmp_path, TINY) == drawn == read_demo_data(tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    whole = contents(tmp_path)
    drawn.description.unlink()
    drawn.annotations.write_text("half")
    draw_demo_data(tmp_path, TINY, 9001)
    assert contents(tmp_path) == whole
    with pytest.raises(ValueError, match="demo data with other settings: .*seed=0.*, not .*seed=1"):
        draw_demo_data(tmp_path, dataclasses.replace(TINY, seed=1))
    drawn.description.write_text(json.dumps(json.loads(drawn.description.read_text()) | {"version": 0}))
    with pytest.raises(ValueError, match=r"demo.json is of another version.*remove"):
        draw_demo_data(tmp_path, TINY)


@pytest.fixture(scope="module")
def server(drawn: data.DemoData):
    with DemoServer(drawn.root, port=0) as server:
        yield server


def fetch(server: DemoServer, path: str, timeout: float = 5.0) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def test_good_urls_lead_to_their_image_and_broken_ones_misbehave_as_they_say(drawn, server):
    status, headers, body = fetch(server, "/images/000007.jpg")
    assert (status, headers["Content-Type"]) == (200, "image/jpeg")
    assert body == (drawn.images / "000007.jpg").read_bytes()
    for path in ("/images/999999.jpg", "/images/../train.tsv", "/broken/404/000301.jpg"):
        assert fetch(server, path)[0] == 404
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        fetch(server, "/broken/dropped/000302.jpg")
    assert fetch(server, "/broken/html/000303.jpg")[1]["Content-Type"] == "text/html; charset=utf-8"
    with pytest.raises(OSError, match="truncated"):
        Image.open(io.BytesIO(fetch(server, "/broken/truncated/000304.jpg")[2])).load()
    _, headers, body = fetch(server, "/broken/bomb/000305.png")
    assert (headers["Content-Type"], struct.unpack(">II", body[16:24])) == ("image/png", (30_000, 30_000))
    assert len(body) < 200
    status, headers, _ = fetch(server, "/broken/private-redirect/000306.jpg")
    assert (status, headers["Location"]) == (302, "http://10.255.255.1/000306.jpg")
    with pytest.raises(TimeoutError):
        fetch(server, "/broken/slow/000307.jpg", timeout=0.5)


def test_a_taken_port_is_named(drawn, server):
    with pytest.raises(ValueError, match=f"port {server.server_port} of the URLs"):
        DemoServer(drawn.root, server.server_port)
