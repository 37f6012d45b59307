"""The page of `vlbert predict --serve`: what it answers is the predictor's, and nobody else's page may ask."""

import base64
import contextlib
import dataclasses
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from browser import chromium
from places import PROJECT
from playwright.sync_api import Browser, expect
from predicted import WEIGHTS
from starlette.testclient import TestClient
from tiny import tiny_sample

from demo.serve import png_bomb
from detectors.image_file import IMAGES
from vlbert.predict import Predictor, Ranker
from vlbert.predict import page as prediction_page
from vlbert.predict.page import make_server, page_app

PHOTO = tiny_sample(3).image
JSON = {"Content-Type": "application/json"}


class Watched(Predictor):
    """Counts how many threads are in it at a time."""

    inside = most = 0

    def __call__(self, *arguments, **named):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        try:
            return super().__call__(*arguments, **named)
        finally:
            self.inside -= 1


@pytest.fixture(scope="module")
def predictor(models: Path) -> Predictor:
    return Watched(str(models / "runs/pretraining"))


@pytest.fixture(scope="module")
def page(predictor: Predictor) -> TestClient:
    return TestClient(page_app(predictor), base_url="http://127.0.0.1:8000")


def ask(page: TestClient, **question: object) -> dict:
    return page.post("/answer", json=question).raise_for_status().json()


def dropped(page: TestClient) -> dict:
    return page.post("/regions", content=PHOTO).raise_for_status().json()


def test_answers_are_the_predictors_one_at_a_time(page, predictor, monkeypatch):
    found, sample = dropped(page), predictor.detect(PHOTO)
    assert [one["name"] for one in found["regions"]] == predictor(sample).names
    assert found["regions"][0]["box"] == pytest.approx(sample.regions.boxes[0], abs=0.01)
    assert base64.b64decode(found["src"].partition(",")[2]) == sample.image
    texts = [f"a {word} [MASK]" for word in ("red", "green", "blue", "white")]
    predictor.most = 0
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: ask(page, image=found["image"], text=text), texts))
    assert predictor.most == 1
    for text, answer in zip(texts, answers, strict=True):
        expected = predictor(sample, text)
        assert (answer["question"], answer["answer"]) == (text, expected.answer)
        assert [tuple(line) for line in answer["lines"]] == expected.lines()[1:]
    masked = ask(page, image=found["image"], mask_regions=[2])
    assert [box["number"] for box in masked["boxes"]] == [2]
    assert masked["attention"] is None
    monkeypatch.setattr(prediction_page, "_MAX_SAMPLES", 1)  # another image lets the first be forgotten
    dropped(page)
    assert page.post("/answer", json={"image": found["image"], "text": "a [MASK]"}).status_code == 410


REFUSED = [  # path, body, headers, status, what is named
    ("/", None, {"Host": "127.0.0.1.evil.example:8000"}, 400, "host"),
    ("/docs", None, {}, 404, "Not Found"),
    ("/regions", PHOTO, {"Origin": "http://127.0.0.1:1"}, 403, "another site"),
    ("/regions", PHOTO, {"Origin": "null"}, 403, "another site"),
    ("/answer", b"{}", JSON | {"Sec-Fetch-Site": "cross-site"}, 403, "another site"),
    ("/regions", b"", {"Content-Length": str(IMAGES.max_bytes + 1)}, 413, "Too Large"),
    ("/regions", b"<html>", {}, 400, "not_image"),
    ("/regions", png_bomb(), {}, 400, "too_many_pixels"),
    ("/answer", b'{"image": 3}', JSON, 400, "Question.image is 3, not"),
    ("/answer", b'{"text": NaN}', JSON, 400, "Question.image is missing"),
    ("/answer", b'{"text": 3}', JSON, 400, "Question.image is missing"),
    ("/answer", b"[]", JSON, 400, "holds a list, not an object"),
    ("/answer", b" " * 2**22 + b"{}", JSON, 400, "(at most 4194304 bytes) is truncated"),
    ("/answer", b'{"image": "IMAGE", "text": "a [MASK] \\ud800"}', JSON, 400, "not Unicode text"),
    ("/answer", b'{"image": "x", "text": "a [MASK]"}', JSON, 410, "drop it again"),
    ("/answer", b'{"image": "IMAGE", "text": " "}', JSON, 400, "write a text"),
    ("/answer", b'{"image": "IMAGE", "captions": ["a square"]}', JSON, 400, "cannot rank captions"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "named"), REFUSED)
def test_what_is_refused(page, path, body, headers, status, named):
    if body and b"IMAGE" in body:
        body = body.replace(b"IMAGE", dropped(page)["image"].encode())
    reply = page.request("GET" if body is None else "POST", path, content=body, headers=headers)
    assert (reply.status_code, named in reply.text) == (status, True), reply.text


FIELDS = ("image", "text", "captions", "choices", "answer", "mask_regions", "attention")
VALUES = [None, 5, -1, 2**70, 1e30, float("nan"), float("inf"), "x", "\ud800", "\u202e", [], [5], ["x"], [None], {}]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_question_that_is_missing_or_of_another_type_is_named(page, field):
    question = {"image": dropped(page)["image"], "text": "a [MASK]", "mask_regions": [1]}
    for value in VALUES:
        for asked in (question | {field: value}, {field: value}):
            reply = page.post("/answer", content=json.dumps(asked), headers=JSON)
            assert reply.status_code in (200, 400, 410), reply.text
            assert isinstance(detail := reply.json().get("detail", ""), str), "the page shows it"
            if reply.status_code == 400:
                assert re.search(
                    rf"Question.{field}\b|Question.image is missing|region|choices|captions|answer|text", detail
                )


def test_the_page_is_for_this_machine_alone(page, predictor, monkeypatch):
    hostile = {"classes": ["<script>alert(1)</script>\u202e"] * 36}
    monkeypatch.setattr(predictor.detector, "metadata", predictor.detector.metadata | hostile)
    for host in ("localhost:9000", "127.0.0.1", "[::1]:8000"):  # through a tunnel the port is another one
        reply = page.get("/", headers={"Host": host})
        assert reply.status_code == 200
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:|//)""", reply.text), "it loads nothing else"
    assert "<script>alert(1)" not in reply.text
    assert "\u202e" not in reply.text + str(dropped(page)["regions"])
    assert reply.headers["X-Frame-Options"] == "DENY"
    own = {"Origin": "http://localhost:9000", "Host": "localhost:9000", "Sec-Fetch-Site": "same-origin"}
    assert page.post("/regions", content=PHOTO, headers=own).status_code == 200


def test_words_of_a_strangers_model_are_printable(models, tmp_path):
    folder = shutil.copytree(models / "runs/vqa-pixels/step-0000001", tmp_path / "model")
    (folder / "state.json").unlink()
    (folder / "task.json").write_text(json.dumps({"answers": ["y\u202e", "n\x1b[2J", "r\u2066"]}))
    page = TestClient(page_app(Predictor(str(folder))), base_url="http://127.0.0.1:8000")
    found = ask(page, image=dropped(page)["image"], text="is a square red")
    words = [found["answer"], *(text for text, _ in found["lines"])]
    assert (len(words), all(map(str.isprintable, words))) == (4, True)


# --- many clients -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(predictor: Predictor) -> Iterator[str]:
    """The URL of a page, served in a thread meanwhile."""
    server = make_server(predictor, 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = server.force_exit = True  # also with requests that wait
        thread.join()


def open_connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.split("/")[2], timeout=120)


def begin_upload(url: str, size: int | None, sent: bytes) -> socket.socket:
    """A connection on which an upload of a size has begun, or one in chunks."""
    host, port = url.split("/")[2].split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    kind = f"Content-Length: {size}" if size else "Transfer-Encoding: chunked"
    connection.sendall(f"POST /regions HTTP/1.1\r\nHost: {host}:{port}\r\n{kind}\r\n\r\n".encode() + sent)
    return connection


def test_64_clients_at_once_all_get_their_answer(predictor):
    begin = threading.Barrier(64)

    def ask_as_one(number: int) -> int:
        connection = open_connection(url)
        connection.connect()
        begin.wait()
        connection.request("POST", "/regions", PHOTO + bytes(number * 10_000))
        return connection.getresponse().status

    with served(predictor) as url, ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask_as_one, range(64))) == [200] * 64


def test_unfinished_uploads_are_bounded_together_and_end(predictor, monkeypatch, capfd):
    size = len(PHOTO) + 500_000
    monkeypatch.setattr(prediction_page, "IMAGES", dataclasses.replace(IMAGES, max_bytes=size))
    monkeypatch.setattr(prediction_page, "_MAX_BODIES", 2 * size)
    monkeypatch.setattr(prediction_page, "_BODY_SECONDS", 2.0)
    with served(predictor) as url:
        begin_upload(url, size, PHOTO).close()  # its client leaves
        unfinished = [begin_upload(url, size, PHOTO + bytes(400_000)) for _ in range(2)]
        unfinished += [begin_upload(url, None, b"7a120\r\n" + bytes(100))]
        dripping = threading.Thread(target=drip, args=[unfinished[0]])
        dripping.start()
        honest = open_connection(url)
        honest.request("GET", "/")
        assert honest.getresponse().read(), "a page is served meanwhile"
        started = time.monotonic()
        honest.request("POST", "/regions", PHOTO)
        assert honest.getresponse().status == 200
        assert 1 < time.monotonic() - started < 30, "it waited for the first two to end"
        dripping.join(timeout=30)  # no reply is read from it: its last byte may reset the connection
        assert not dripping.is_alive(), "a byte now and then keeps no upload open"
        for connection in unfinished[1:]:
            reply = b"".join(iter(lambda: connection.recv(2**16), b""))  # noqa: B023
            assert reply.startswith(b"HTTP/1.1 408 "), reply
            assert b"the upload took over 2 s" in reply
    assert "Traceback" not in capfd.readouterr().err


def drip(connection: socket.socket) -> None:
    """Send a byte ten times a second until the connection is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"\0")
            time.sleep(0.1)


# --- in a browser -----------------------------------------------------------------------------------------------------

QUESTIONS = {  # run -> what is written into the page's fields
    "pretraining": {"text": "a [MASK] square and a [MASK]"},
    "refcoco": {"text": "the red square"},
    "vqa": {"text": "is a square red"},
    "vcr": {"text": "why is [1] red", "answer": "red", "choices": ["a red square", "[1] is", "is a blue", "white"]},
    "retrieval": {"captions": ["a red square\na blue circle"]},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("run", QUESTIONS)
def test_an_image_is_asked_about_in_a_browser(models, browser, run):
    fields, kind = QUESTIONS[run], Ranker if run == "retrieval" else Predictor
    predictor = kind(f"{models}/runs/{run}", WEIGHTS)
    sample = predictor.detect(PHOTO)
    if run == "retrieval":
        lines = predictor.captions(sample, fields["captions"][0].splitlines())
        answer = lines[0][0]
    else:
        prediction = predictor(sample, fields["text"], fields.get("choices", ()), fields.get("answer", ""))
        answer, lines = prediction.answer, prediction.lines()[1:]
    page, errors = browser.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    with served(predictor) as url:
        page.goto(url)
        expect(page.locator(".ask")).to_be_disabled()
        page.set_input_files("#file", {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": PHOTO})
        expect(page.locator("#chips button")).to_have_text(predictor(sample).names)
        for name, value in fields.items():
            for number, text in enumerate([value] if isinstance(value, str) else value):
                page.locator(f"[name={name}]").nth(number).fill(text)
        page.locator("[name=attention]").check()
        page.locator(".ask").click()
        expect(page.locator(".result .big")).to_have_text([answer], timeout=30_000)
        written = page.locator(".result li").evaluate_all(
            "all => all.map(one => [...one.childNodes].map(n => n.textContent))"
        )
        assert written == [[text] if number is None else [text, f"{number:.3f}"] for text, number in lines]
        assert page.locator("#panels img").evaluate("one => one.naturalWidth > 300")
        assert errors == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_at_once(models, number, status):
    command = [sys.executable, "-m", "vlbert", "predict", f"{models}/runs/retrieval", "--serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        host = re.search(r"127.0.0.1:\d+", next(line for line in process.stderr if "running" in line))[0]
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("POST", "/regions", PHOTO)
        image = json.loads(connection.getresponse().read())["image"]
        many = json.dumps({"image": image, "captions": ["a red square"] * 50_000}).encode()  # for a minute or more
        connection.request("POST", "/answer", many, JSON)
        time.sleep(1)
        process.send_signal(number)
        started = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - started < 5
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            connection.getresponse()
        assert process.returncode == status, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
