"""Rows against real servers that misbehave: a status for every row, within its deadline."""

import asyncio
import contextlib
import gzip
import importlib.metadata
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from places import PROJECT
from web import Answer, Web, draw, drip, encode, in_turn, raw, results, send, settings_for, silent, statuses

from demo.serve import free_port
from storage.catalog import Catalog
from storage.collect.fetch import DownloadSettings
from storage.collect.rows import CaptionRow
from storage.object_store import open_store

JPEG = encode(draw())


def one(url: str, settings: DownloadSettings) -> CaptionRow:
    (result,) = results([url], settings)
    return result


def reset_in_body(handler: BaseHTTPRequestHandler) -> None:
    send(JPEG[:100], length=len(JPEG))(handler)
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def chunked(*chunks: bytes, end: bool) -> Answer:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + (b"0\r\n\r\n" if end else b"")
    return raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)


def headed(*headers: bytes, body: bytes = JPEG, status: bytes = b"HTTP/1.1 200 OK", end: bytes = b"\r\n") -> Answer:
    return raw(end.join([status, *headers, b"", b""]) + body)


def encoded(encoding: bytes, body: bytes = JPEG) -> Answer:
    return headed(b"Content-Length: %d" % len(body), b"Content-Encoding: " + encoding, body=body)


def headless(data: bytes) -> bytes:
    """Return the stream without zlib's header, which is what some servers call `deflate`."""
    return zlib.compress(data)[2:-4]


PACKED = gzip.compress(JPEG)
LENGTH = b"Content-Length: %d" % len(JPEG)
CHUNKED, CHUNKS = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(JPEG), JPEG)
# What the server does -> the row's status.
ANSWERS: dict[str, tuple[Answer, str]] = {
    "a jpeg with the type html": (send(JPEG, Content_Type="text/html"), "ok"),
    "chunked": (chunked(JPEG[:100], JPEG[100:], end=True), "ok"),
    "gzip": (send(gzip.compress(JPEG), Content_Encoding="gzip"), "ok"),
    "404": (send(b"no", 404), "http_404"),
    "status 999": (send(JPEG, 999), "http_other"),
    "redirect without location": (send(b"", 302), "http_other"),
    "redirect to a private address": (send(b"", 302, Location="http://10.0.0.1/"), "blocked_address"),
    "chunks without an end": (chunked(JPEG, end=False), "short_body"),
    "a reset in the body": (reset_in_body, "short_body"),
    "half a gzip stream": (send(gzip.compress(JPEG)[:-20], Content_Encoding="gzip"), "short_body"),
    "brotli": (send(JPEG[4:], Content_Encoding="br"), "bad_response"),
    "an encoding that names no coding": (encoded(b"UTF-8"), "ok"),
    "an encoding that is a type": (encoded(b"image/jpeg"), "ok"),
    "a list of encodings": (encoded(b"aws-chunked, gzip", gzip.compress(JPEG)), "ok"),
    "gzip that is not packed": (encoded(b"gzip"), "ok"),
    "brotli that is not packed": (encoded(b"br"), "ok"),
    "deflate that is not packed": (encoded(b"deflate"), "ok"),
    "deflate": (encoded(b"deflate", zlib.compress(JPEG)), "ok"),
    "deflate without a header": (encoded(b"deflate", headless(JPEG)), "ok"),
    "a body whose first byte comes alone": (raw(b"HTTP/1.1 200 OK\r\n\r\n", PACKED[:1], PACKED[1:], pause=0.1), "ok"),
    "gzip that is not named": (encoded(b"none", gzip.compress(JPEG)), "ok"),
    "two members of gzip": (encoded(b"gzip", gzip.compress(JPEG[:99]) + gzip.compress(JPEG[99:])), "ok"),
    "bytes behind gzip": (encoded(b"gzip", gzip.compress(JPEG) + b"\0\0"), "ok"),
    "a bomb of two members": (encoded(b"gzip", gzip.compress(JPEG) + gzip.compress(bytes(10**7))), "too_big"),
    "a header of 60 kB": (headed(b"Content-Security-Policy: " + b"a" * 60_000, LENGTH), "ok"),
    "300 headers": (headed(*[b"X-%d: a" % number for number in range(300)], LENGTH), "ok"),
    "odd headers": (headed(b"Server : x", b"no colon", b"My name: x", b"X-\xe9: \0", b": x", LENGTH), "ok"),
    "bytes behind the body": (headed(LENGTH, b"Connection: close", body=JPEG + b"some more bytes"), "ok"),
    "bytes behind the chunks": (headed(CHUNKED, body=CHUNKS + b"some more bytes"), "ok"),
    "a length twice": (headed(LENGTH, LENGTH.replace(b": ", b" : ") + b", %d" % len(JPEG)), "ok"),
    "a hint first": (raw(b"HTTP/1.1 103 Hints\r\n\r\n", b"HTTP/1.1 200 OK\r\nA : b\r\n", b"\r\n" + JPEG), "ok"),
    "a tag of 15 kB": (headed(b"X-Robots-Tag: " + b"a," * 7_500, LENGTH), "ok"),
    "no reason, and line feeds": (headed(LENGTH, status=b"HTTP/1 200", end=b"\n"), "ok"),
    "203": (send(JPEG, 203), "ok"),
    "206": (send(JPEG, 206), "ok"),
    "206 with a part": (send(JPEG[:300], 206), "truncated"),
    "202 without an image": (send(b"<html>soon", 202), "http_other"),
    "two lengths": (headed(LENGTH, b"Content-Length: 9"), "bad_response"),
    "a length beside chunks": (headed(LENGTH, CHUNKED, body=CHUNKS), "bad_response"),
    "a malformed chunk": (headed(CHUNKED, body=b"12x\r\n" + JPEG), "short_body"),
    "not http": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "bad_response"),
    "endless headers": (raw(b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 1_000_000), "bad_response"),
    "a status line of bytes": (raw(b"HTTP/1.1 404 \xff\xfe\r\nContent-Length: 0\r\n\r\n"), "http_404"),
    "hangs up at once": (raw(b""), "connect"),
    "more pixels than allowed": (send(encode(draw(500, 400))), "too_many_pixels"),
    "more bytes announced than allowed": (send(b"x", length=10**12), "too_big"),
    "a gzip bomb": (send(gzip.compress(b"\0" * 50_000_000), Content_Encoding="gzip"), "too_big"),
    "slow drip": (drip(JPEG, 1, 0.05), "timeout"),
    "silence": (silent(10), "timeout"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answered(web: Web) -> dict[str, CaptionRow]:
    """All of ANSWERS, downloaded at once: each must get its own status whatever its neighbours do."""
    urls = {name: web.put(f"/answer/{i}.jpg", answer) for i, (name, (answer, _)) in enumerate(ANSWERS.items())}
    settings = settings_for(web, deadline=3.0, max_bytes=200_000, max_pixels=190_000)
    return dict(zip(urls, results(urls.values(), settings), strict=True))


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_ends_in_its_status(answered: dict[str, CaptionRow], name: str):
    result = answered[name]
    assert result.status == ANSWERS[name][1], result.detail
    assert (result.image is not None) == (result.status == "ok")
    assert bool(result.detail) == (result.status != "ok")
    assert result.status != "ok" or result.image.jpeg == JPEG
    result.detail.encode()  # no lone surrogates: it goes into a Parquet file


TAGS, ROBOTS = b"X-Robots-Tag: " + b"a," * 4000, b"User-agent: *\nDisallow: /"
# What would keep the event loop from all other URLs for 30 to 300 ms, of images and of robots.txt.
BLOCKING: dict[str, Answer] = {
    "a large body": send(bytes(20_000_000)),
    "chunks of one byte": headed(b"Transfer-Encoding: chunked", body=b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n"),
    "a gzip bomb": send(gzip.compress(b"") + gzip.compress(bytes(200_000_000)), Content_Encoding="gzip"),
    "directives": headed(*30 * [TAGS]),
    "a name of dots": headed(b"Location: http://" + b"a." * 4000, status=b"HTTP/1.1 302 Found"),
    "lines": headed(*39_000 * [b"c"], end=b"\n"),
    "gzip members": encoded(b"gzip", 50_000 * gzip.compress(b"")),
    "malformed chunks": headed(CHUNKED, body=b"zz" + bytes(range(256)) * 4000),
    "hints": raw(16_000 * b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a head without an end": raw(b"HTTP/1.1 200 OK\r\n" + b"a\n" * 130_000),
    "noise": raw(bytes(range(256)) * 4000),
    "a long reason": headed(status=b"HTTP/1.1 503 " + b"http://a:b@c/?token=d " * 350),
}
BLOCKING_ROBOTS = {
    "percent signs": ROBOTS + b"%" * 500_000,
    "escapes": ROBOTS + b"%41" * 160_000 + b"\n",
    "lines of escapes": b"User-agent: *\n" + b"".join(b"Disallow: /%d%%%%%%%%%%%%%%%%\n" % i for i in range(9_000)),
    "bytes that are no text": ROBOTS + b"\xff" * 499_000 + b"\n",
    "wildcards": b"User-agent: *\n" + b"Disallow: /*ab$\n" * 4900,
    "empty lines": b"\r" * 500_000,
}


@pytest.mark.parametrize("name", [*BLOCKING, *BLOCKING_ROBOTS])
def test_no_answer_keeps_the_event_loop_from_others(name: str, web: Web, monkeypatch: pytest.MonkeyPatch):
    """Seconds of the processor, of the loop's thread alone, of its longest callback: under 0.02 where this was written.

    The shortest of three, because of caches and of memory that another process wants.
    """
    longest, run = 0.0, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest
        begin = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - begin)

    results([web.url("/none")], settings_for(web))  # which imports modules
    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    web.put("/robots.txt", send(BLOCKING_ROBOTS.get(name, b"")))
    url = web.put("/" + 7000 * "a" + ".jpg", BLOCKING.get(name, send(JPEG)))
    tries = []
    for _ in range(3):
        longest = 0.0
        results([url], settings_for(web, deadline=20))
        tries.append(longest)
    del web.pages["/robots.txt"]
    assert min(tries) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "busy"), [(0, 0), (1, 2)])
def test_a_hostile_web_costs_no_good_row_in_any_order(seed: int, busy: int, web: Web, tmp_path: Path):
    """Half of 600 rows are good, on the host of all hostile answers and on one more; also beside busy processes."""
    hostile = [answer for answer, status in ANSWERS.values() if status != "ok"] + [*BLOCKING.values()]
    urls = [web.put(f"/hostile/{i}-{n}.jpg", answer) for i, answer in enumerate(hostile) for n in range(12)]
    with contextlib.ExitStack() as stack:
        hosts = [web, *(stack.enter_context(Web(f"127.0.0.{2 + i}")) for i in range(1 + len(BLOCKING_ROBOTS)))]
        for host, robots in zip(hosts[2:], BLOCKING_ROBOTS.values(), strict=True):
            host.put("/robots.txt", send(robots))
            urls += [host.put(f"/{i}.jpg", send(JPEG)) for i in range(4)]
        good = [host.put(f"/good/{i}.jpg", send(JPEG)) for host in hosts[:2] for i in range(150)]
        rows = [*urls, *good]
        random.Random(seed).shuffle(rows)
        file = tmp_path / "list.tsv"
        file.write_text("".join(f"caption\t{url}\n" for url in rows))
        for _ in range(busy):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        command = [sys.executable, "-m", "vlbert", "collect", f"{tmp_path}/root", "captions", f"--captions={file}"]
        command += ["--rows_per_shard=100", "--download.deadline=10", "--download.max_bytes=2000000"]
        command += ["--download.allowed_hosts", *(host.host for host in hosts)]
        subprocess.run(command, cwd=PROJECT, check=True, timeout=300)
    tables = Catalog(open_store(f"{tmp_path}/root"), "captions").columns("images", ["url", "status"])
    found = {row["url"]: row["status"] for table in tables for row in table.to_pylist()}
    assert found.keys() == {*rows}
    assert {url: found[url] for url in good if found[url] != "ok"} == {}


def test_what_cannot_be_connected_to_says_why(web: Web):
    port = free_port()
    settings = DownloadSettings(allowed_hosts=(f"127.0.0.1:{port}",), retries=0)
    assert one(f"http://127.0.0.1:{port}/", settings).status == "connect"
    assert one("http://no-such-host.invalid/a.jpg", settings_for(web)).status == "dns"
    assert one(web.url("/a.jpg").replace("http:", "https:"), settings_for(web)).status == "tls"


def test_names_without_an_answer_delay_neither_other_names_nor_the_end(web: Web, monkeypatch: pytest.MonkeyPatch):
    released, system = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *arguments: object, **options: object) -> list:
        if host.endswith(".example"):
            released.wait(5)
        return system(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)  # no name server of this machine can be made to be silent
    web.put("/lives.jpg", send(JPEG))
    port = web.server.server_port
    lives = f"http://localhost:{port}/lives.jpg"
    urls = [*(f"http://dead{i}.example/" for i in range(12)), lives]
    settings = DownloadSettings(deadline=1.5, retries=0, allowed_hosts=(f"localhost:{port}",))
    started = time.monotonic()
    try:
        found = statuses(urls, settings)
    finally:
        released.set()
    assert time.monotonic() - started < 4
    assert found == 12 * ["timeout"] + ["ok"]


def test_redirects_are_followed_up_to_the_limit(web: Web):
    web.put("/hop/0", send(JPEG))
    for hop in range(1, 7):
        to = f"/hop/{hop - 1}" if hop % 2 else web.url(f"/hop/{hop - 1}")
        web.put(f"/hop/{hop}", send(b"elsewhere", [0, 301, 302, 303, 307, 308, 301][hop], Location=to))
    urls = [web.url("/hop/5"), web.url("/hop/6"), web.put("/circle", send(b"", 302, Location="/circle"))]
    assert statuses(urls, settings_for(web)) == ["ok", "too_many_redirects", "too_many_redirects"]


@pytest.mark.parametrize(
    "location", [b"/caf\xe9.jpg", b" \\x\\..\\caf\xe9.jpg", "/caf\u00e9.jpg".encode(), b"/caf%E9.jpg"]
)
def test_a_redirect_may_have_raw_bytes(location: bytes, web: Web):
    web.put("/caf%E9.jpg", send(JPEG))
    web.put("/caf%C3%A9.jpg", send(JPEG))
    url = web.put("/from", headed(b"Location: " + location, b"Content-Length: 0", body=b"", status=b"HTTP/1.1 302 F"))
    assert one(url, settings_for(web)).status == "ok"


def test_the_url_is_sent_as_the_list_has_it(web: Web):
    port = web.server.server_port
    sent = {
        "/caf%C3%A9%2f%7E%41.jpg?x=1&y=2+%2B;z='!": "/caf%C3%A9%2f%7E%41.jpg?x=1&y=2+%2B;z='!",
        "/a b\u00e9|.jpg#part": "/a%20b%C3%A9%7C.jpg",
        "/0007.jpg#frag": "/0007.jpg",
        "/UPPER.JPG": "/UPPER.JPG",
        "/a.jpg?itok\\x3dRfA": "/a.jpg?itok%5Cx3dRfA",
        "/sub\\a.jpg": "/sub/a.jpg",
        "/a\u202f\xa0\xad\u2028.jpg": "/a%E2%80%AF%C2%A0%C2%AD%E2%80%A8.jpg",
        "/50%_off%2f.jpg": "/50%25_off%2f.jpg",
    }
    for path, seen in sent.items():
        web.put(seen, send(JPEG))
        result = one(f" HTTP://127.0.0.1:{port}{path} ", settings_for(web))
        assert result.status == "ok", result
        assert web.requests[-1][1] == seen


def test_requests_name_the_program_and_its_contact_and_send_no_cookies(web: Web):
    url = web.put("/who.jpg", in_turn(send(JPEG, Set_Cookie="id=1"), send(JPEG)))
    settings = settings_for(web, contact="https://example.org/about-our-crawl")
    one(url, settings)
    one(url, settings)
    headers = web.requests[-1][2]
    agent = f"vlbert-downloader/{importlib.metadata.version('vlbert')}"
    assert headers["User-Agent"] == f"{agent} (+https://example.org/about-our-crawl)"
    assert headers["Accept-Encoding"] == "identity"
    assert headers["Connection"] == "close"  # what a server sends behind an answer is never taken for the next one
    assert "Cookie" not in headers
    assert DownloadSettings().user_agent == agent


def test_a_lasting_failure_is_not_requested_again(web: Web):
    for number, lasting in enumerate((send(b"", 404), send(b"<html>"), send(b"x", length=10**12))):
        assert one(web.put(f"/lasting/{number}", lasting), settings_for(web, retries=2)).status != "ok"
        assert web.count_of(f"/lasting/{number}") == 1


def test_too_few_open_files_end_the_program():
    code = (
        "import resource, sys; sys.path.append('tests'); from web import DownloadSettings, statuses;"
        "hosts = [f'127.0.1.{i}:{sys.argv[1]}' for i in range(1, 51)];"
        "files = [open('/dev/null') for _ in range(80)]; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100));"
        "statuses([f'http://{host}/a.jpg' for host in hosts], DownloadSettings(allowed_hosts=tuple(hosts)))"
    )
    with Web("0.0.0.0") as web:
        command = [sys.executable, "-c", code, str(web.server.server_port)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("OSError: [Errno 24]")
    assert "raise `ulimit -n`, or lower concurrency" in last


def test_an_error_of_the_program_names_its_url_and_leaves_nothing_running(web: Web, monkeypatch: pytest.MonkeyPatch):
    urls = [web.put("/a.jpg", send(JPEG)), web.put("/drip.jpg", drip(JPEG, 1, 0.1))]

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("storage.collect.download.normalise", broken)
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError) as raised:
        results(urls, settings_for(web, deadline=30))
    assert time.monotonic() - begin < 3
    assert web.url("/a.jpg") in "".join(raised.value.__notes__)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("decode")]
