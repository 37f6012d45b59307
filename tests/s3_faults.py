"""A proxy before an S3 server with the faults of networks that a test plans: statuses, resets, bodies cut short.

A real TCP server. It lets conditional writes through one at a time, because moto itself decides no races.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import urllib3
from s3 import environment

_ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>as the test plans</Message></Error>'


class FaultyS3(ThreadingHTTPServer):
    """The proxy; `strip` names headers that it takes away from requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, server: str, strip: frozenset[str]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.strip = urllib3.connection_from_url(server), {name.lower() for name in strip}
        self.planned: list[tuple[str, str, str]] = []
        self.one_at_a_time = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def plan(self, method: str, part: str, *faults: str) -> None:
        """The next requests of this method whose path holds `part` suffer these, one each: a status, or a fault.

        `reset before`: the server never hears of it; `reset after`: it did it, and the answer is lost; `truncated`.
        """
        self.planned += [(method, part, fault) for fault in faults]

    def fault(self, method: str, path: str) -> str:
        """What is to happen to this request; `none` for nothing."""
        for one in self.planned:
            if one[0] == method and one[1] in path:
                self.planned.remove(one)
                return one[2]
        return "none"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that went away


@contextlib.contextmanager
def faulty(server: str, strip: frozenset[str] = frozenset()) -> Iterator[FaultyS3]:
    """The proxy, which boto3 finds through the environment meanwhile."""
    proxy = FaultyS3(server, strip)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with environment(AWS_ENDPOINT_URL=proxy.endpoint):
            yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FaultyS3
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault(self.command, self.path)
        if fault.isdigit():
            error = _ERROR.format("SlowDown" if fault == "503" else "Refused")
            return self._answer(int(fault), [("Content-Type", "application/xml")], error.encode())
        if fault == "reset before":
            return self._reset()
        status, headers, answer = self._ask(body)
        if fault == "reset after" or (fault == "truncated" and not answer):
            return self._reset()
        return self._answer(status, headers, answer, cut=fault == "truncated")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        left_out = {"expect", "connection", *self.server.strip}
        headers = {name: value for name, value in self.headers.items() if name.lower() not in left_out}
        with self.server.one_at_a_time if "If-None-Match" in self.headers else contextlib.nullcontext():
            answer = self.server.behind.urlopen(
                self.command, self.path, body, headers, retries=False, redirect=False, decode_content=False
            )
        return answer.status, [*answer.headers.items()], answer.data

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        lengths = {"content-length": str(len(body))}  # of HEAD it is the object's
        for name, value in (lengths | {name.lower(): value for name, value in headers}).items():
            if name not in ("transfer-encoding", "connection"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True

    def _reset(self) -> None:
        """RST, not FIN: nothing is sent, and nothing of it is kept."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
