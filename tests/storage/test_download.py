"""Rows -> Downloads against a real server that misbehaves: a status for every row, within its deadline."""

import asyncio
import gzip
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import yarl
from places import PROJECT
from web import Answer, Web, draw, drip, encode, endless, in_turn, raw, send, silent

from storage.addresses import AddressGuard, is_public, parse_url
from storage.catalog import Catalog
from storage.download import (
    FLAGS,
    STATUSES,
    CaptionRow,
    Download,
    DownloadSettings,
    commit_images,
    download,
    download_async,
    import_images,
)
from storage.fetch import Fetcher
from storage.normalise import Refused
from storage.object_store import open_store
from storage.sample import sample_key

JPEG = encode(draw())
PNG = encode(draw(), "PNG")


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


def settings_for(*servers: Web, **changes: object) -> DownloadSettings:
    """Impatient settings that admit these servers and no other address."""
    hosts = tuple(server.host for server in servers)
    patience = {"deadline": 5.0, "connect_timeout": 2.0, "read_timeout": 2.0, "retries": 0, "retry_delay": 0.02}
    patience |= {"second_pass": 0.0, "per_host": 64, "breaker": 64}  # tests/storage/test_download_hosts.py has these
    return DownloadSettings(allowed_hosts=hosts, **(patience | changes))


def rows_of(*urls: str) -> list[CaptionRow]:
    return [CaptionRow(row, f"caption {row}", url) for row, url in enumerate(urls)]


def one(url: str, settings: DownloadSettings) -> Download:
    (result,) = download(rows_of(url), settings)
    assert (result.sample is not None) == (result.status == "ok")
    assert result.status in STATUSES
    return result


def no_one_listens() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reset_in_body(handler: BaseHTTPRequestHandler) -> None:
    send(JPEG[:100], length=len(JPEG))(handler)
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def chunked(*chunks: bytes, end: bool) -> Answer:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + (b"0\r\n\r\n" if end else b"")
    return raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)


# What the server does -> the row's status.
ANSWERS: dict[str, tuple[Answer, str]] = {
    "a jpeg": (send(JPEG, Content_Type="image/jpeg"), "ok"),
    "a png named jpg": (send(PNG, Content_Type="image/jpeg"), "ok"),
    "a jpeg said to be html": (send(JPEG, Content_Type="text/html"), "ok"),
    "no announced length": (send(JPEG, length=-1), "ok"),
    "chunked": (chunked(JPEG[:100], JPEG[100:], end=True), "ok"),
    "gzip, though not asked for": (send(gzip.compress(JPEG), Content_Encoding="gzip"), "ok"),
    "400": (send(b"", 400), "http_400"),
    "403": (send(b"", 403), "http_403"),
    "404": (send(b"no", 404), "http_404"),
    "410": (send(JPEG, 410), "http_410"),
    "429": (send(b"", 429), "http_429"),
    "500": (send(b"", 500), "http_500"),
    "503": (send(b"", 503), "http_503"),
    "599": (send(b"", 599), "http_599"),
    "no content": (send(b"", 204), "http_other"),
    "a part that nobody asked for": (send(JPEG, 206), "http_other"),
    "not modified": (send(b"", 304), "http_other"),
    "status 999": (send(JPEG, 999), "http_other"),
    "redirect without location": (send(b"", 302), "http_other"),
    "redirect to a file": (send(b"", 302, Location="file:///etc/passwd"), "bad_url"),
    "redirect to nonsense": (send(b"", 302, Location="http://[::1"), "bad_url"),
    "redirect with a user name": (send(b"", 302, Location="http://me:secret@example.com/"), "bad_url"),
    "redirect to a private address": (send(b"", 302, Location="http://10.0.0.1/"), "blocked_address"),
    "redirect to another port here": (send(b"", 301, Location="http://127.0.0.1:6379/"), "blocked_address"),
    "redirect to another port elsewhere": (send(b"", 302, Location="http://8.8.8.8:6379/"), "blocked_address"),
    "redirect to a private name": (send(b"", 307, Location="http://localhost/"), "blocked_address"),
    "redirect to a cloud's metadata": (send(b"", 308, Location="http://169.254.169.254/latest"), "blocked_address"),
    "redirect to what is no IPv6 address": (send(b"", 302, Location="http://[64:ff9b:0:0:0:1::127.0.0.1]/"), "bad_url"),
    "redirect to a mapped address": (send(b"", 302, Location="http://[::ffff:127.0.0.1]/"), "blocked_address"),
    "redirect to another scheme": (send(b"", 302, Location="gopher://127.0.0.1:6379/_INFO"), "bad_url"),
    "a length that is no number": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1e3\r\n\r\nx"), "bad_response"),
    "two lengths": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy"), "bad_response"),
    "redirect to a number": (send(b"", 303, Location="http://2130706433/"), "blocked_address"),
    "an html page": (send(b"<html>gone</html>", Content_Type="image/jpeg"), "not_image"),
    "an empty body": (send(b""), "not_image"),
    "half a jpeg, announced as whole": (send(JPEG[: len(JPEG) // 2]), "truncated"),
    "half a jpeg without a length": (send(JPEG[: len(JPEG) // 2], length=-1), "truncated"),
    "less than announced": (send(JPEG[:-200], length=len(JPEG)), "short_body"),
    "chunks without an end": (chunked(JPEG, end=False), "short_body"),
    "a reset in the body": (reset_in_body, "short_body"),
    "half a gzip stream": (send(gzip.compress(JPEG)[:-20], Content_Encoding="gzip"), "short_body"),
    "said to be gzip": (send(JPEG, Content_Encoding="gzip"), "bad_response"),
    "brotli": (send(JPEG, Content_Encoding="br"), "bad_response"),
    "not http": (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "bad_response"),
    "chunks that are none": (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "bad_response"),
    "endless headers": (raw(b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"a" * 100_000 + b"\r\n\r\n"), "bad_response"),
    "a status line that is no text": (raw(b"HTTP/1.1 404 \xff\xfe\r\nContent-Length: 0\r\n\r\n"), "http_404"),
    "hangs up at once": (raw(b""), "connect"),
    "one pixel": (send(encode(draw(1, 1), "GIF")), "bad_geometry"),
    "a banner": (send(encode(draw(900, 40))), "bad_geometry"),
    "more pixels than allowed": (send(encode(draw(500, 400))), "too_many_pixels"),
    "more bytes than allowed": (send(b"\xff\xd8\xff" + b"\0" * 300_000), "too_big"),
    "more bytes than allowed, not announced": (endless(b"\0" * 65536), "too_big"),
    "more bytes announced than allowed": (send(b"x", length=10**12), "too_big"),
    "a gzip bomb": (send(gzip.compress(b"\0" * 50_000_000), Content_Encoding="gzip"), "too_big"),
    "slow drip": (drip(JPEG, 1, 0.05), "timeout"),
    "silence": (silent(10), "timeout"),
}  # fmt: skip


@pytest.fixture(scope="module")
def answered(web: Web) -> dict[str, Download]:
    """All of ANSWERS, downloaded at once: each must get its own status whatever its neighbours do."""
    urls = {name: web.put(f"/answer/{i}.jpg", answer) for i, (name, (answer, _)) in enumerate(ANSWERS.items())}
    settings = settings_for(web, deadline=3.0, read_timeout=2.0, min_rate=0, max_bytes=200_000, max_pixels=190_000)
    begin = time.monotonic()
    results = download(rows_of(*urls.values()), settings)
    assert time.monotonic() - begin < 6
    return dict(zip(urls, results, strict=True))


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_ends_in_its_status(answered: dict[str, Download], name: str):
    result = answered[name]
    assert result.status == ANSWERS[name][1], result.detail
    assert result.status in STATUSES
    assert (result.sample is not None) == (result.status == "ok")
    assert bool(result.detail) == (result.status != "ok")
    result.detail.encode()  # no lone surrogates: it goes into a Parquet file


def test_the_sample_is_what_the_server_sent(answered: dict[str, Download]):
    for name in ("a jpeg", "a jpeg said to be html", "no announced length", "chunked", "gzip, though not asked for"):
        assert answered[name].sample.image == JPEG, name
        assert answered[name].sample.flags == ()
    png = answered["a png named jpg"]
    assert png.sample.flags == ("png",)
    assert (png.sample.width, png.sample.height, png.sample.caption, png.sample.url) == (
        96, 64, png.row.caption, png.row.url,
    )  # fmt: skip
    assert png.sample.key == sample_key(png.row.url, png.row.caption)


def test_silence_is_noticed_before_the_deadline_and_a_drip_at_the_deadline(answered: dict[str, Download]):
    assert "not done after 3 s" in answered["slow drip"].detail
    assert "not done" not in answered["silence"].detail


@pytest.mark.parametrize(
    "url",
    [
        "", "nonsense", "//example.test/protocol-relative.jpg", "/a.jpg", "ftp://example.com/a.jpg", "file:///etc/passwd",
        "data:image/png;base64,AAAA", "http:", "http://", "http:///a.jpg", "http://:80/a.jpg", "https:example.com",
        "http://user@example.com/", "http://user:secret@example.com/", "http://example.com:99999/", "http://example.com:x/",
        "http://[::1/a.jpg", "http://[zz]/", "http://exa mple.com/", "http://example.com/a\nb.jpg", "http://example.com/\x00",
        "http://example.com\\@10.0.0.1/", "http://[64:ff9b:0:0:0:1::127.0.0.1]/", "http://[:::1]/", "http://[127.0.0.1]/",
        "http://127.0.0.1:80:80/", "http://127.0.0.1./", "http://08.8.8.8/",
        "http://a..example.com/", f"http://{'a' * 64}.com/", "http://xn--\u2028.com/",
    ],
)  # fmt: skip
def test_what_is_no_web_address_is_a_bad_url(url: str):
    assert one(url, DownloadSettings(deadline=5)).status == "bad_url"


def test_a_name_that_does_not_exist_is_dns():
    assert one("http://no-such-host.invalid/a.jpg", DownloadSettings(deadline=10)).status == "dns"


def test_a_port_where_no_one_listens_is_connect():
    port = no_one_listens()
    settings = DownloadSettings(allowed_hosts=(f"127.0.0.1:{port}",), retries=0)
    assert one(f"http://127.0.0.1:{port}/", settings).status == "connect"


def test_a_host_that_accepts_nothing_is_a_timeout():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        port = deaf.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # the backlog is full: further handshakes are dropped
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        settings = DownloadSettings(allowed_hosts=(f"127.0.0.1:{port}",), retries=0, connect_timeout=0.3)
        begin = time.monotonic()
        assert one(f"http://127.0.0.1:{port}/", settings).status == "timeout"
        assert time.monotonic() - begin < 2
        for filler in fillers:
            filler.close()


def test_plain_http_where_https_was_asked_for_is_tls(web: Web):
    result = one(web.url("/answer/0.jpg").replace("http:", "https:"), settings_for(web))
    assert result.status == "tls"


BLOCKED = [
    "127.0.0.1", "127.8.8.8", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0",
    "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "192.88.99.1", "[::]", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b::a00:1]", "[64:ff9b:1::1]", "[2002:7f00:1::]",
    "[2002:c0a8:101::1]", "[2001:0:1234::1]", "[2001:db8::1]", "[fe80::1]", "[fc00::1]", "[fd00:ec2::254]",
    "[fec0::1]", "[ff02::1]", "[ff05::1]", "[2606:4700::5efe:10.0.0.1]", "[2606:4700::200:5efe:10.0.0.1]",
    "[::ffff:0:127.0.0.1]", "[::ffff:0.0.0.0]", "[::ffff:169.254.169.254]", "[::ffff:100.64.0.1]",
    "[64:ff9b::169.254.169.254]", "[64:ff9b:1::8.8.8.8]", "[2002:a9fe:a9fe::]", "[2001:10::1]", "[2001:2::1]",
    "[100::1]", "[3fff::1]", "[5f00::1]", "[fe80::1%25lo]", "[::1%25lo]", "[::ffff:127.0.0.1%251]",
    "[2606:4700::1111%25lo]", "[0:0:0:0:0:ffff:7f00:1]", "localhost", "LOCALHOST", "\uff11\uff12\uff17.0.0.1",
    "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1", "192.168.257", "0300.0250.0.1", "0xc0a80101",
    "3232235777", "0x7f.0x0.0x0.0x1", "00000177.1", "4294967295", "100.100.100.200", "192.0.0.192", "239.255.255.250",
]  # fmt: skip


@pytest.mark.parametrize("host", BLOCKED)
def test_addresses_that_are_not_public_are_refused_in_every_form(host: str):
    for scheme in ("http", "https"):
        result = one(f"{scheme}://{host}/a.jpg", DownloadSettings(deadline=5))
        assert result.status == "blocked_address", result


@pytest.mark.parametrize(
    "host", ["%31%32%37.0.0.1", "127%2e0.0.1", "0x7f000001.", "127.0.0.1%00.example.com", "localhost."]
)
def test_names_that_look_like_addresses_lead_nowhere(web: Web, host: str):
    settings = DownloadSettings(deadline=5, second_pass=0, allowed_hosts=(web.host,))
    assert one(f"http://{host}/a.jpg", settings).status in ("dns", "blocked_address", "bad_url")
    assert one(f"http://{host}:{web.server.server_port}/a.jpg", settings).status == "blocked_address"


@pytest.mark.parametrize("host", ["example.com", "8.8.8.8", "[2606:4700::1111]"])
@pytest.mark.parametrize("port", [22, 81, 8080, 6379])
def test_other_ports_are_refused(host: str, port: int):
    assert one(f"http://{host}:{port}/", DownloadSettings()).status == "blocked_address"


@pytest.mark.parametrize(
    "address",
    [
    "8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "100.63.255.255", "100.128.0.1", "2606:4700::1111",
    "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1", "168.63.129.17",
    ],
)  # fmt: skip
def test_public_addresses_are_admitted(address: str):
    assert is_public(ipaddress.ip_address(address))
    host = f"[{address}]" if ":" in address else address
    assert AddressGuard(()).check_url(f"https://{host}/a.jpg").host == address


def test_the_demo_server_is_refused_unless_it_is_allowed(web: Web):
    url = web.put("/allowed.jpg", send(JPEG))
    before = len(web.requests)
    assert one(url, DownloadSettings()).status == "blocked_address"
    assert one(url, DownloadSettings(allowed_hosts=("127.0.0.1:1", "localhost:80"))).status == "blocked_address"
    assert len(web.requests) == before
    assert one(url, settings_for(web)).status == "ok"


def test_an_allowed_name_admits_its_address_and_no_other_name_does(web: Web):
    port = web.server.server_port
    url = f"http://localhost:{port}/allowed.jpg"
    web.put("/allowed.jpg", send(JPEG))
    settings = DownloadSettings(allowed_hosts=(f"LOCALHOST:{port}",), retries=0, concurrency=1)
    assert one(url, settings).status == "ok"
    # The address behind an allowed name is not itself allowed, not even after that name led there.
    results = download(rows_of(url, web.url("/allowed.jpg"), f"http://localhost.:{port}/allowed.jpg"), settings)
    assert [result.status for result in results] == ["ok", "blocked_address", "blocked_address"]


def fetch_with(lookup: Callable, url: str, settings: DownloadSettings) -> str:
    async def fetch() -> str:
        async with Fetcher(settings, lookup) as fetcher:
            try:
                with fetcher.budget.share() as share:
                    await fetcher.fetch(url, share)
            except Refused as refused:
                return refused.status
            return "ok"

    return asyncio.run(fetch())


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], ["2606:4700::1", "fe80::1%lo"]])
def test_a_name_that_leads_to_a_private_address_is_refused(addresses: list[str]):
    async def lookup(host: str, port: int) -> list[str]:
        return addresses

    assert fetch_with(lookup, "http://innocent.example/", DownloadSettings()) == "blocked_address"


def test_an_allowed_port_of_loopback_is_not_opened_to_other_names(web: Web):
    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    url = f"http://rebound.example:{web.server.server_port}/allowed.jpg"
    assert fetch_with(lookup, url, settings_for(web)) == "blocked_address"


def test_every_connection_is_made_through_the_last_look(web: Web):
    class Lax(AddressGuard):
        """Forgets to look at what a name leads to."""

        def check_url(self, url: str) -> yarl.URL:
            return parse_url(url)

        def check_address(self, *_: object) -> None:
            pass

        def open_socket(self, address_info: tuple) -> socket.socket:
            return AddressGuard(()).open_socket(address_info)

    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def fetch(url: str) -> str:
        fetcher = Fetcher(settings_for(web), lookup)
        fetcher.guard = Lax(())
        async with fetcher:
            with pytest.raises(Refused) as refused, fetcher.budget.share() as share:
                await fetcher.fetch(url, share)
        return refused.value.status

    before = len(web.requests)
    for host in ("rebound.example", "127.0.0.1"):
        assert asyncio.run(fetch(f"http://{host}:{web.server.server_port}/allowed.jpg")) == "blocked_address"
    assert len(web.requests) == before


def test_the_last_look_is_at_the_address_connected_to():
    guard = AddressGuard(("127.0.0.1:8791",))
    info = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    guard.open_socket((*info, ("127.0.0.1", 8791))).close()
    guard.open_socket((*info, ("8.8.8.8", 443))).close()
    for address in (("127.0.0.1", 8792), ("10.0.0.1", 80)):
        with pytest.raises(Refused, match="not a public address"):
            guard.open_socket((*info, address))


def test_proxies_of_the_environment_are_not_used(web: Web, monkeypatch: pytest.MonkeyPatch):
    url = web.put("/allowed.jpg", send(JPEG))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{no_one_listens()}")
    assert one(url, settings_for(web)).status == "ok"


def test_redirects_are_followed_up_to_the_limit(web: Web):
    web.put("/hop/0", send(JPEG))
    for hop in range(1, 5):
        to = f"/hop/{hop - 1}" if hop % 2 else web.url(f"/hop/{hop - 1}")
        web.put(f"/hop/{hop}", send(b"elsewhere", [301, 302, 303, 307, 308][hop], Location=to))
    assert one(web.url("/hop/3"), settings_for(web, max_redirects=3)).status == "ok"
    assert one(web.url("/hop/4"), settings_for(web, max_redirects=3)).status == "too_many_redirects"
    assert one(web.url("/hop/0"), settings_for(web, max_redirects=0)).status == "ok"
    web.put("/circle", send(b"", 302, Location="/circle"))
    assert one(web.url("/circle"), settings_for(web)).status == "too_many_redirects"


def test_redirects_from_one_server_to_another_need_both_allowed(web: Web):
    with Web() as other:
        target = other.put("/a.jpg", send(JPEG))
        url = web.put("/away", send(b"", 302, Location=target))
        assert one(url, settings_for(web)).status == "blocked_address"
        assert other.requests == []
        assert one(url, settings_for(web, other)).status == "ok"


def test_slow_redirects_share_one_deadline(web: Web):
    def slow(to: str) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.server.stopping.wait(0.3)
            send(b"", 302, Location=to)(handler)

        return answer

    for hop in range(5):
        web.put(f"/slow/{hop}", slow(f"/slow/{hop + 1}"))
    begin = time.monotonic()
    assert one(web.url("/slow/0"), settings_for(web, deadline=0.7, max_redirects=9)).status == "timeout"
    assert time.monotonic() - begin < 1.4


def test_the_url_is_sent_as_the_list_has_it(web: Web):
    port = web.server.server_port
    sent = {
        "/caf%C3%A9%2f%7E%41.jpg?x=1&y=2+%2B;z='!": "/caf%C3%A9%2f%7E%41.jpg?x=1&y=2+%2B;z='!",
        "/a b\u00e9|.jpg#part": "/a%20b%C3%A9%7C.jpg",
        "/0007.jpg#frag": "/0007.jpg",
        "/UPPER.JPG": "/UPPER.JPG",
    }
    for path, seen in sent.items():
        web.put(seen, send(JPEG))
        result = one(f" HTTP://127.0.0.1:{port}{path} ", settings_for(web))
        assert result.status == "ok", result
        assert web.requests[-1][1] == seen
        assert result.sample.url == result.row.url


def test_servers_are_told_who_asks(web: Web):
    url = web.put("/who.jpg", in_turn(send(JPEG, Set_Cookie="id=1"), send(JPEG)))
    settings = settings_for(web, contact="https://example.org/about-our-crawl")
    one(url, settings)
    one(url, settings)
    headers = web.requests[-1][2]
    assert headers["User-Agent"] == "vlbert-downloader/0.1 (+https://example.org/about-our-crawl)"
    assert headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in headers
    assert DownloadSettings().user_agent == "vlbert-downloader/0.1"


@pytest.mark.parametrize("passing", [send(b"", 503), send(b"", 500), send(b"", 429), raw(b"")])
def test_what_passes_is_tried_again(web: Web, passing: Answer):
    url = web.put("/flaky.jpg", in_turn(passing, passing, send(JPEG)))
    before = web.asked("/flaky.jpg")
    assert one(url, settings_for(web, retries=2)).status == "ok"
    assert web.asked("/flaky.jpg") - before == 3


def test_tries_end_and_the_last_failure_counts(web: Web):
    url = web.put("/broken.jpg", in_turn(send(b"", 503), send(b"", 502)))
    before = web.asked("/broken.jpg")
    result = one(url, settings_for(web, retries=2))
    assert (result.status, web.asked("/broken.jpg") - before) == ("http_502", 3)
    assert "3 attempts" in result.detail


def test_names_that_are_not_answered_hold_up_neither_living_ones_nor_the_end(web: Web, monkeypatch: pytest.MonkeyPatch):
    released, system = threading.Event(), socket.getaddrinfo

    def look_up(host: str, *arguments: object, **options: object) -> list:
        if host.endswith(".example"):
            released.wait(5)
        return system(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)  # no name server of this machine can be made to be silent
    web.put("/lives.jpg", send(JPEG))
    port = web.server.server_port
    lives = f"http://localhost:{port}/lives.jpg"
    rows = rows_of(*(f"http://dead{i}.example/" for i in range(12)), lives)
    settings = DownloadSettings(deadline=1.5, retries=0, allowed_hosts=(f"localhost:{port}",))
    started = time.monotonic()
    try:
        results = download(rows, settings)
    finally:
        released.set()
    assert time.monotonic() - started < 4
    assert [result.status for result in results] == 12 * ["timeout"] + ["ok"]


def test_results_come_in_row_order_and_are_the_same_every_time(web: Web):
    def after(seconds: float) -> Answer:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            time.sleep(seconds)
            send(JPEG)(handler)

        return answer

    urls = [web.put(f"/order/{i}.jpg", after((7 * i % 10) / 50)) for i in range(10)]
    urls[4] = web.url("/nowhere.jpg")
    rows = [CaptionRow(100 + 3 * i, f"c{i}", url) for i, url in enumerate(urls)]
    results = download(rows, settings_for(web))
    assert [result.row for result in results] == rows
    assert [result.status for result in results] == ["ok"] * 4 + ["http_404"] + ["ok"] * 5
    assert download(rows, settings_for(web, concurrency=1, decode_threads=1)) == results


def test_the_second_of_two_equal_rows_is_a_duplicate(web: Web):
    url, other = web.put("/same.jpg", send(JPEG)), web.put("/other.jpg", send(JPEG))
    pairs = [("a", url), ("b", url), ("a", url), ("a", other), ("b", url), ("x", "nonsense"), ("x", "nonsense")]
    before = web.asked("/same.jpg")
    results = download([CaptionRow(i, *pair) for i, pair in enumerate(pairs)], settings_for(web))
    expected = ["ok", "ok", "duplicate", "ok", "duplicate", "bad_url", "duplicate"]
    assert [result.status for result in results] == expected
    assert web.asked("/same.jpg") - before == 1
    assert results[4].detail == "of row 1"
    assert [result.sample.caption for result in results if result.sample] == ["a", "b", "a"]
    assert len({result.sample.key for result in results if result.sample}) == 3


def test_progress_is_told_up_to_the_last_row(web: Web):
    url = web.put("/same.jpg", send(JPEG))
    rows = [CaptionRow(i, str(i % 3), u) for i, u in enumerate([url, url, url, url, web.url("/none"), "bad"])]
    told = []
    download(rows, settings_for(web), lambda *progress: told.append(progress))
    assert len(told) == 3  # one for each distinct URL
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1] == (6, 6, {"ok": 3, "duplicate": 1, "http_404": 1, "bad_url": 1})


def test_no_rows_give_no_downloads():
    assert download([], DownloadSettings()) == []


def test_it_works_inside_a_running_event_loop(web: Web):
    rows = rows_of(web.put("/loop.jpg", send(JPEG)))

    async def caller() -> tuple[list[Download], list[Download]]:
        return download(rows, settings_for(web)), await download_async(rows, settings_for(web))

    blocking, awaited = asyncio.run(caller())
    assert blocking == awaited
    assert blocking[0].status == "ok"


def test_decoding_does_not_hold_up_the_event_loop(web: Web):
    large = encode(draw(500, 400).resize((1500, 1200)), "PNG", compress_level=1)
    urls = [web.put(f"/large/{i}.png", send(large)) for i in range(2)]
    gaps = []

    async def caller() -> list[Download]:
        async def tick() -> None:
            while True:
                begin = time.monotonic()
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - begin)

        ticking = asyncio.create_task(tick())
        results = await download_async(rows_of(*urls), settings_for(web, max_bytes=50_000_000))
        ticking.cancel()
        return results

    begin = time.monotonic()
    assert [result.status for result in asyncio.run(caller())] == ["ok", "ok"]
    whole = time.monotonic() - begin
    assert len(gaps) > 10
    assert max(gaps) < whole / 2


def test_an_error_of_the_program_is_raised_and_leaves_nothing_running(web: Web):
    urls = [web.put("/a.jpg", send(JPEG)), web.put("/drip.jpg", drip(JPEG, 1, 0.1))]

    def broken(*_: object) -> None:
        raise ZeroDivisionError("in the callback")

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the callback"):
        download(rows_of(*urls), settings_for(web, deadline=30), broken)
    assert time.monotonic() - begin < 3
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("decode", "download"))]


def test_local_images_are_imported_with_the_same_statuses(tmp_path: Path):
    contents = {
        "a.jpg": JPEG,
        "b.png": PNG,
        "c.jpg": JPEG[: len(JPEG) // 2],
        "d.jpg": b"<html>",
        "e.jpg": encode(draw(20, 20)),
        "f.jpg": encode(draw(400, 400), quality=100),
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "folder.jpg").mkdir()
    files = [tmp_path / name for name in (*contents, "gone.jpg", "folder.jpg")] + [tmp_path / "a.jpg"]
    told = []
    results = import_images(files, DownloadSettings(max_bytes=100_000), lambda *progress: told.append(progress))
    assert [result.status for result in results] == [
        "ok", "ok", "truncated", "not_image", "bad_geometry", "too_big", "missing_file", "missing_file", "duplicate",
    ]  # fmt: skip
    first = results[0]
    assert first.row == CaptionRow(0, "", "a.jpg")
    assert (first.sample.image, first.sample.url, first.sample.key) == (JPEG, "a.jpg", sample_key("a.jpg", ""))
    assert "gone.jpg" in results[6].detail
    assert told[-1][:2] == (9, 9)


def test_a_shard_is_committed_with_every_row_and_its_settings(web: Web, tmp_path: Path):
    good, png = web.put("/shard/a.jpg", send(JPEG)), web.put("/shard/b.png", send(PNG))
    pairs = [("a", good), ("b", png), ("c", web.url("/gone.jpg")), ("a", good), ("d", "nonsense"), ("e", good)]
    rows = [CaptionRow(20 + i, *pair) for i, pair in enumerate(pairs)]
    catalog = Catalog(open_store(str(tmp_path / "one")), "captions")
    assert commit_images(catalog, "00002", download(rows, settings_for(web)), settings_for(web), source="train.tsv")
    manifest = catalog.manifest("images", "00002")
    table = manifest.table.to_pydict()
    assert table["row"] == [20, 21, 22, 23, 24, 25]
    assert table["status"] == ["ok", "ok", "http_404", "duplicate", "bad_url", "ok"]
    assert table["key"] == [sample_key(url, caption) for caption, url in pairs]
    assert table["url"] == [url for _, url in pairs]
    samples = list(catalog.read("images", "00002"))
    assert [(sample.caption, sample.url) for sample in samples] == [pairs[0], pairs[1], pairs[5]]
    assert samples[0].image == JPEG
    assert manifest.meta["source"] == {"list": "train.tsv", "rows": [20, 26]}
    assert manifest.meta["config"]["max_side"] == 1024

    again, settings = Catalog(open_store(str(tmp_path / "two")), "captions"), settings_for(web, concurrency=1)
    commit_images(again, "00002", download(rows, settings), settings, source="train.tsv")
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()} for name in ("one", "two")]
    assert files[0] == files[1]  # no timestamps, nothing that does not decide bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline": 0}, "deadline"),
        ({"concurrency": 0}, "concurrency"),
        ({"per_host": 0}, "per_host"),
        ({"breaker": 0}, "breaker"),
        ({"second_pass": -1}, "second_pass"),
        ({"max_bytes_in_flight": 1000}, "max_bytes_in_flight is 1000, under max_bytes 20971520.*raise"),
        ({"retries": -1}, "retries"),
        ({"allowed_hosts": ("127.0.0.1",)}, "host:port"),
        ({"allowed_hosts": ("*:80",)}, "host:port"),
        ({"allowed_hosts": ("http://127.0.0.1:80",)}, "host:port"),
        ({"allowed_hosts": "127.0.0.1:80"}, "tuple"),
        ({"contact": "a\r\nX-Header: b"}, "control characters"),
        ({"max_side": 0}, "max_side"),
    ],
)
def test_settings_check_themselves(settings: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        DownloadSettings(**settings)


def test_the_documented_statuses_and_flags_are_those_of_the_code():
    page = (PROJECT / "docs" / "download.md").read_text()
    for name, meaning in {**STATUSES, **FLAGS}.items():
        if not name.startswith("http_") or name == "http_other":
            assert f"| `{name}` | {meaning} |" in page
