"""Serve the images of the demo data over HTTP, and misbehave at the URLs that say so, as the web does.

python -m demo.serve FOLDER
"""

import http.server
import re
import socket
import struct
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Annotated, Self

import tyro

from demo.data import image_name, read_demo_data
from storage.programs import Command, Positional

HOST = "127.0.0.1"
PRIVATE_ADDRESS = "http://10.255.255.1/"  # where "private-redirect" points: a network no caption list may reach
BOMB_SIDE = 30_000  # pixels: what the header of "bomb" promises
DRIP_SECONDS = 1.0  # between two bytes of "slow": any image takes hours


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind((HOST, 0))
        return trial.getsockname()[1]


def png_bomb() -> bytes:
    """A PNG of a few dozen bytes whose header promises 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", BOMB_SIDE, BOMB_SIDE, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection per request (HTTP/1.0), so that no idle connection keeps the server from stopping."""

    server: "DemoServer"
    wbufsize = -1  # the header leaves with the body
    timeout = 10  # seconds that a silent client may hold a thread

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if image := re.fullmatch(r"/images/([0-9]+\.jpg)", path):
            if (file := self.server.images / image[1]).is_file():
                return self.answer("image/jpeg", file.read_bytes())
        elif broken := re.fullmatch(r"/broken/([a-z-]+)/([0-9.a-z]+)", path):
            return self.misbehave(*broken.groups())
        return self.send_error(404)

    def misbehave(self, kind: str, name: str) -> None:
        some_image = (self.server.images / image_name(0)).read_bytes()
        if kind == "dropped":
            # Closing with a linger time of 0 resets the connection.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif kind == "html":
            page = b"<!DOCTYPE html><title>Moved</title><p>This image has moved to our new gallery.</p>\n"
            self.answer("text/html; charset=utf-8", page)
        elif kind == "truncated":
            self.answer("image/jpeg", some_image[: len(some_image) // 2])
        elif kind == "slow":
            self.answer("image/jpeg", some_image, DRIP_SECONDS)
        elif kind == "bomb":
            self.answer("image/png", png_bomb())
        elif kind == "private-redirect":
            self.send_response(302)
            self.send_header("Location", PRIVATE_ADDRESS + name)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_error(404)

    def answer(self, content_type: str, body: bytes, pause: float = 0) -> None:
        """Send the body; with a pause after each byte, if there is one."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for part in (bytes([byte]) for byte in body) if pause else (body,):
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(pause)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a thousand lines of access log would hide those of the stages."""


class DemoServer(http.server.ThreadingHTTPServer):
    """Serves the images of the demo data in `folder` in a thread, on 127.0.0.1, while the `with` block runs.

    port: None takes the one in the lists of URLs, 0 any free one. ValueError where it is taken.
    """

    request_queue_size = 256  # a downloader opens many connections at once
    block_on_close = False  # a slow answer need not end

    def __init__(self, folder: Path, port: int | None = None):
        data = read_demo_data(folder)
        self.images, port = data.images, data.port if port is None else port
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} is taken, and the URLs of {folder} name it ({error}); stop what listens there, or draw "
                "with another one first: python -m demo.data OTHER/data --port PORT, then make demo ROOT=OTHER"
            ) from error
        self.base_url = f"http://{HOST}:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may hang up or fall silent; any other error is one of this program and is printed."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def serve(folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]) -> None:
    """Serve the demo data over HTTP, until Ctrl-C.

    Args:
        folder: that demo.data drew into
    """
    with DemoServer(folder) as server:
        print(f"serving {folder} at {server.base_url} (Ctrl-C stops it)", flush=True)
        threading.Event().wait()


main = Command("python -m demo.serve", serve)

if __name__ == "__main__":
    main()
