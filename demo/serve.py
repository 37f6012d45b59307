"""Serve the images of the demo data over HTTP, and simulate the web's faults at URLs below /broken.

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
from typing import Annotated, Any, Self

import tyro

from demo.data import image_name, read_demo_data
from storage.programs import Command, Positional

HOST = "127.0.0.1"
PRIVATE_ADDRESS = "http://10.255.255.1/"  # target of "private-redirect": a network that downloads must not reach
BOMB_SIDE = 30_000  # width and height in the header of "bomb", in pixels
DRIP_SECONDS = 1.0  # time between two bytes of "slow": any image takes hours


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind((HOST, 0))
        return trial.getsockname()[1]


def png_bomb() -> bytes:
    """Return a PNG of a few dozen bytes whose header declares 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", BOMB_SIDE, BOMB_SIDE, 8, 2, 0, 0, 0)  # 8 bits, RGB
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(bytes(1000))), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Request handler with one connection per request (HTTP/1.0), so that idle connections do not delay shutdown."""

    server: "DemoServer"  # ty: ignore[incompatible-mutable-override] the only server
    wbufsize = -1  # send the header together with the body
    timeout = 10  # seconds until the connection of a silent client is closed

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if image := re.fullmatch(r"/images/([0-9]+\.jpg)", path):
            if (file := self.server.images / image[1]).is_file():
                return self.answer("image/jpeg", file.read_bytes())
        elif broken := re.fullmatch(r"/broken/([a-z-]+)/([0-9.a-z]+)", path):
            return self.simulate_fault(*broken.groups())
        return self.send_error(404)

    def simulate_fault(self, kind: str, name: str) -> None:
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
        """Send a response. If `pause` is not 0, send the body byte by byte with this many seconds between bytes."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for part in (bytes([byte]) for byte in body) if pause else (body,):
            self.wfile.write(part)
            self.wfile.flush()
            time.sleep(pause)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because a thousand lines of access log would hide the stages' lines."""


class DemoServer(http.server.ThreadingHTTPServer):
    """Context manager: serve the images of the demo data in `folder` on 127.0.0.1, in a thread.

    The default port is the one in the data's URLs. Port 0 means any free port. Raises ValueError if the port is in use.
    """

    request_queue_size = 256  # a downloader opens many connections at once
    block_on_close = False  # do not wait for slow responses

    def __init__(self, folder: Path, port: int | None = None):
        data = read_demo_data(folder)
        self.images, port = data.images, data.port if port is None else port
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} of the URLs in {folder} is in use ({error}); stop the program that uses it, or draw new "
                "data with another port: python -m demo.data OTHER/data --port PORT, then make demo ROOT=OTHER"
            ) from error
        self.base_url = f"http://{HOST}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors, except those caused by clients that disconnect or stop responding."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        self.shutdown()
        self.server_close()


def serve(folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")]) -> None:
    """Serve the demo data over HTTP, until Ctrl-C.

    Args:
        folder: folder of the demo data
    """
    with DemoServer(folder) as server:
        print(f"serving {folder} at {server.base_url} (Ctrl-C to stop)", flush=True)
        threading.Event().wait()


main = Command("python -m demo.serve", serve)

if __name__ == "__main__":
    main()
