"""A real HTTP server on 127.0.0.1 for tests, which misbehaves where a path tells it to."""

import asyncio
import io
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

from storage.collect.download import Downloader
from storage.collect.fetch import DownloadSettings
from storage.collect.rows import CaptionRow
from storage.collect.spool import Spool

Answer = Callable[[BaseHTTPRequestHandler], None]


def draw(width: int = 96, height: int = 64, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image with slopes and noise: not so plain that a decoder could guess the rest of it."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    slopes = np.stack([x * 255 / width, y * 255 / height, (x + y) * 255 / (width + height)], axis=-1)
    pixels = (slopes + rng.integers(-12, 13, slopes.shape)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encode(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def send(body: bytes, status: int = 200, length: int | None = None, **headers: str) -> Answer:
    """An ordinary answer; `length` is a Content-Length that need not be true."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.close_connection |= length is not None
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def raw(*parts: bytes, pause: float = 0.0) -> Answer:
    """These bytes and nothing else, a pause after each part, then the connection is closed."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        for part in parts:
            handler.wfile.write(part)
            handler.server.stopping.wait(pause)
        handler.close_connection = True

    return answer


def drip(body: bytes, step: int, pause: float) -> Answer:
    """The headers at once, then `step` bytes every `pause` seconds: never silent, never done."""
    first = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:step]
    return raw(first, *(body[start : start + step] for start in range(step, len(body), step)), pause=pause)


def silent(seconds: float) -> Answer:
    """No answer for so long, then none at all."""
    return raw(b"", pause=seconds)


def in_turn(*answers: Answer) -> Answer:
    """The first answer to the first request, and so on; the last one stays."""
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with the default of 5, a burst of connections waits a second for the next SYN


class Web:
    """The server, a context manager: `put` serves an answer at a path, `requests` has time, path and headers of each.

    Those for robots.txt are in `robots_requests` alone, so that a test of images need not know of them.
    To a downloader each address is a host of its own: all of 127.0.0.0/8 is this machine.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.pages: dict[str, Answer] = {}
        self.requests: list[tuple[float, str, dict[str, str]]] = []
        self.robots_requests: list[tuple[float, str, dict[str, str]]] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                requests = web.robots_requests if self.path == "/robots.txt" else web.requests
                requests.append((time.monotonic(), self.path, dict(self.headers)))
                # A client that hangs up in the middle is what many of these tests want.
                with suppress(ConnectionError):
                    web.pages.get(self.path, send(b"no such page", 404))(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Server((address, 0), Handler)
        self.server.handle_error = lambda *_: None  # a hung-up client again
        self.server.stopping = threading.Event()

    def __enter__(self) -> "Web":
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stopping.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def host(self) -> str:
        """address:port, as an allow-list names it."""
        return "{}:{}".format(*self.server.server_address)

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def put(self, path: str, answer: Answer) -> str:
        """Serve `answer` at `path`; its URL."""
        self.pages[path] = answer
        return self.url(path)

    def count_of(self, path: str) -> int:
        return sum(1 for _, requested, _ in self.requests if requested == path)


def settings_for(*servers: Web | str, **changes: object) -> DownloadSettings:
    """Impatient settings that admit these servers, or host:port, and no other address."""
    hosts = tuple(server if isinstance(server, str) else server.host for server in servers)
    return DownloadSettings(allowed_hosts=hosts, **({"deadline": 5.0, "retries": 0} | changes))


def results(urls: Iterable[str], settings: DownloadSettings) -> list[CaptionRow]:
    """What becomes of these URLs, as one shard; their images can be read as long as a row lives."""
    rows = [CaptionRow(row, f"caption {row}", url) for row, url in enumerate(urls)]

    async def work() -> list[CaptionRow]:
        async with Downloader(settings) as downloader:
            return await downloader.download(rows, Spool().__enter__())

    return asyncio.run(work())


def statuses(urls: Iterable[str], settings: DownloadSettings) -> list[str]:
    return [item.status for item in results(urls, settings)]
