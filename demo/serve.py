"""Serve the images of the demo data over HTTP, and misbehave at the URLs that say so, as the web does.

python -m demo.serve FOLDER
"""

import argparse
import errno
import http.server
import re
import signal
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from demo.data import DEFAULT_PORT, image_name, read_demo_data

HOST = "127.0.0.1"
PRIVATE_ADDRESS = "http://10.255.255.1/"  # where "private-redirect" points: a network no caption list may reach
BOMB_SIDE = 30_000  # pixels: what the header of "bomb" promises
DRIP_SECONDS = 1.0  # between two bytes of "slow": any image takes hours


def free_port(preferred: int = DEFAULT_PORT) -> int:
    """`preferred`, or some free port if another program listens there."""
    for port in (preferred, 0):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is no obstacle
            try:
                trial.bind((HOST, port))
            except OSError as error:
                if port == 0 or error.errno != errno.EADDRINUSE:
                    raise
            else:
                return trial.getsockname()[1]
    raise AssertionError("port 0 was taken")


def png_bomb() -> bytes:
    """A PNG of a few dozen bytes whose header promises 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", BOMB_SIDE, BOMB_SIDE, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection per request (HTTP/1.0), so that no idle connection keeps the server from stopping."""

    server: "_Server"
    wbufsize = -1  # header and body leave together
    timeout = 10  # seconds that a silent client may hold a thread

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if image := re.fullmatch(r"/images/([0-9]+\.jpg)", path):
            file = self.server.images / image[1]
            if file.is_file():
                return self.answer(200, "image/jpeg", file.read_bytes())
        elif broken := re.fullmatch(r"/broken/([a-z-]+)/([0-9]+\.(?:jpg|png))", path):
            return self.misbehave(*broken.groups())
        return self.not_found()

    def misbehave(self, kind: str, name: str) -> None:
        if kind == "dropped":
            # Closing with a linger time of 0 resets the connection.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif kind == "html":
            page = b"<!DOCTYPE html><title>Moved</title><p>This image has moved to our new gallery.</p>\n"
            self.answer(200, "text/html; charset=utf-8", page)
        elif kind == "truncated":
            whole = self.server.some_image()
            self.answer(200, "image/jpeg", whole[: len(whole) // 2])
        elif kind == "slow":
            self.drip(self.server.some_image())
        elif kind == "bomb":
            self.answer(200, "image/png", png_bomb())
        elif kind == "private-redirect":
            self.send_response(302)
            self.send_header("Location", PRIVATE_ADDRESS + name)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.not_found()

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def not_found(self) -> None:
        self.answer(404, "text/plain; charset=utf-8", b"no such image\n")

    def drip(self, body: bytes) -> None:
        """Send `body` byte by byte until it is sent, the client leaves or the server stops."""
        self.send_response(200)
        self.send_header("Content-Type", "image/jpeg")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for byte in body:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            if self.server.stopping.wait(DRIP_SECONDS):
                return

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a thousand lines of access log would hide those of the stages."""


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # a downloader opens many connections at once
    daemon_threads = False  # server_close waits for the threads: none outlives the server

    def __init__(self, images: Path, port: int):
        self.images = images
        self.stopping = threading.Event()
        super().__init__((HOST, port), _Handler)

    def some_image(self) -> bytes:
        return (self.images / image_name(0)).read_bytes()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may hang up or fall silent; any other error is one of this program and is printed."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class DemoServer:
    """Serves the images of the demo data in `folder` in a thread, on 127.0.0.1, while the `with` block runs.

    port: None takes the one in the lists of URLs, 0 any free one. ValueError where it is taken.
    """

    def __init__(self, folder: Path, port: int | None = None):
        data = read_demo_data(folder)
        port = data.port if port is None else port
        try:
            self._server = _Server(data.images, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(
                f"port {port} is taken, and the URLs of {folder} name it; stop what listens there, or draw other demo "
                "data: make demo ROOT=OTHER"
            ) from error
        self.port = self._server.server_address[1]
        self.base_url = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="demo-server")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.serve", description="Serve the demo data over HTTP.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that demo.data drew into")
    folder = parser.parse_args(arguments).folder
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = DemoServer(folder)
    except ValueError as error:
        sys.exit(f"error: {error}")
    with server:
        print(f"serving {folder} at {server.base_url} (Ctrl-C stops it)", flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
