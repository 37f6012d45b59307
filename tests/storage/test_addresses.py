"""No URL of a list leads into a private network, however it is written, and none shows its secrets."""

import asyncio
import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web import Web, draw, encode, send, settings_for, statuses

from storage.collect.addresses import AddressGuard, is_public, parse_url
from storage.collect.fetch import DownloadSettings, Fetcher
from storage.collect.statuses import Refused
from storage.redact import display_url, redacted

JPEG = encode(draw())


def refusal(url: str) -> str:
    """The status of a URL that no list may request."""
    try:
        AddressGuard(()).check_url(url)
    except Refused as refused:
        return refused.status
    return statuses([url], DownloadSettings(deadline=5))[0]


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
def test_a_malformed_url_is_a_bad_url(url: str):
    assert refusal(url) == "bad_url"


BLOCKED = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "0", "192.168.257",
    "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "168.63.129.16", "192.88.99.1", "[::]", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::127.0.0.1]", "[64:ff9b::127.0.0.1]", "[64:ff9b:1::8.8.8.8]", "[2002:7f00:1::]", "[2001:0:1234::1]",
    "[2001:db8::1]", "[fe80::1]", "[fd00:ec2::254]", "[fec0::1]", "[ff02::1]", "[2606:4700::5efe:10.0.0.1]",
    "[2606:4700::200:5efe:10.0.0.1]", "[::ffff:0:127.0.0.1]", "[2001:10::1]", "[2001:2::1]", "[100::1]", "[3fff::1]",
    "[5f00::1]", "[fc00::1]", "[::1%25lo]", "[::ffff:127.0.0.1%251]", "[2606:4700::1111%25lo]", "localhost",
    "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1", "LOCALHOST", "example.com:22",
    "8.8.8.8:8080", "[2606:4700::1111]:8080",
]  # fmt: skip


@pytest.mark.parametrize("host", BLOCKED)
def test_addresses_that_are_not_public_are_refused_in_every_form(host: str):
    for scheme in ("http", "https"):
        assert refusal(f"{scheme}://{host}/a.jpg") == "blocked_address"


@pytest.mark.parametrize("host", ["%31%32%37.0.0.1", "127%2e0.0.1", "0x7f000001.", "127.0.0.1%00.x.com", "localhost."])
def test_names_that_look_like_addresses_lead_nowhere(host: str):
    assert refusal(f"http://{host}/a.jpg") in ("dns", "blocked_address", "bad_url")
    assert refusal(f"http://{host}:8791/a.jpg") == "blocked_address"


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
    assert AddressGuard(()).check_url(f"http://{host}").path == "/"


def test_a_local_server_is_refused_unless_it_is_allowed_whatever_proxies_there_are(web: Web, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    url = web.put("/allowed.jpg", send(JPEG))
    before = len(web.requests + web.robots_requests)
    assert statuses([url], DownloadSettings()) == ["blocked_address"]
    assert statuses([url], DownloadSettings(allowed_hosts=("127.0.0.1:1", "localhost:80"))) == ["blocked_address"]
    assert len(web.requests + web.robots_requests) == before
    assert statuses([url], settings_for(web)) == ["ok"]


def test_an_allowed_name_admits_its_address_and_no_other_name_does(web: Web):
    port = web.server.server_port
    url = f"http://localhost:{port}/allowed.jpg"
    web.put("/allowed.jpg", send(JPEG))
    settings = DownloadSettings(allowed_hosts=(f"LOCALHOST:{port}",), retries=0, concurrency=1)
    # The address behind an allowed name is not itself allowed, not even after that name led there.
    urls = [url, web.url("/allowed.jpg"), f"http://localhost.:{port}/allowed.jpg"]
    assert [statuses([url], settings) for url in urls] == [["ok"], ["blocked_address"], ["blocked_address"]]


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str, error: OSError | None = None) -> None:
    """Every name leads to these addresses."""

    async def lookup(host: str, port: int) -> list[str]:
        if error is not None:
            raise error
        return list(addresses)

    monkeypatch.setattr("storage.collect.addresses.system_lookup", lookup)


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], ["2606:4700::1", "fe80::1%lo"]])
def test_a_name_that_leads_to_a_private_address_is_refused(addresses: list[str], web: Web, monkeypatch):
    resolve(monkeypatch, *addresses)
    assert statuses(["http://innocent.example/"], DownloadSettings()) == ["blocked_address"]
    # An allowed port of loopback is not open to other names.
    assert statuses([f"http://rebound.example:{web.server.server_port}/"], settings_for(web)) == ["blocked_address"]


def test_every_connection_is_checked_by_open_socket(web: Web, monkeypatch: pytest.MonkeyPatch):
    async def fetch(url: str) -> str:
        fetcher = Fetcher(settings_for(web))
        guard = fetcher.guard = AddressGuard(())  # checks no URL and no resolved address
        guard.check_url, guard.check_address, guard.open_socket = (
            parse_url,
            lambda *_: None,
            AddressGuard(()).open_socket,
        )
        async with fetcher:
            with pytest.raises(Refused) as refused:
                async with fetcher.hosts.slot("") as slot:
                    await fetcher.fetch(url, slot)
        return refused.value.status

    resolve(monkeypatch, "127.0.0.1")
    before = len(web.requests + web.robots_requests)
    for host in ("rebound.example", "127.0.0.1"):
        assert asyncio.run(fetch(f"http://{host}:{web.server.server_port}/allowed.jpg")) == "blocked_address"
    assert len(web.requests + web.robots_requests) == before


@pytest.mark.parametrize(("code", "transient"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_a_look_up_that_failed_for_now_is_transient_and_an_unknown_name_is_not(code: int, transient: bool, monkeypatch):
    resolve(monkeypatch, error=socket.gaierror(code, "as the system says"))

    async def work() -> Refused:
        async with Fetcher(DownloadSettings(retries=2)) as fetcher:
            with pytest.raises(Refused) as refused:
                async with fetcher.hosts.slot("") as slot:
                    await fetcher.fetch("http://name.example/a.jpg", slot)
        return refused.value

    refused = asyncio.run(work())
    assert refused.status == "dns"
    assert (refused.retry_after is not None) == transient


SECRET = "s3cr3t"
_WORD = st.text("abcXYZ019._~-", min_size=1, max_size=12)


@given(_WORD, _WORD, _WORD, st.text("abc/é;=%[]'", max_size=12))
def test_a_url_is_shown_with_its_host_and_without_its_secrets(user: str, host: str, path: str, password: str):
    secret = f"{password}{SECRET}"
    for url in (
        f"http://{user}:{secret.replace('/', '')}@{host}/{path}?key={secret}#{secret}",
        f"HTTPS://{host}:80/{path}?{secret}",
        f"//{user}:{secret.replace('/', '')}@{host}/{path}",
        f"http://{user}:at@{secret.replace('/', '')}@{host}/{path}",
    ):
        assert SECRET not in display_url(url)
        assert f"{host}" in display_url(url)
        assert path in display_url(url)
    assert SECRET not in redacted(f"Cannot connect to http://{host}/{path}?key={SECRET} [none], nor /x?{user}={SECRET}")
    plain = f"http://{host}/{path}.jpg"
    assert display_url(plain) == redacted(plain) == plain
