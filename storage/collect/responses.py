"""HTTP responses as servers send them: repaired before aiohttp's strict parser reads them.

Each connection serves one response, so no byte of a response can be taken for another one. Therefore these are
accepted, as in browsers: headers of any name and up to 64 kB, blanks before a colon, equal lengths that are given
twice, other versions in the status line, and bytes after the body. Different lengths, and a length beside chunks, say
two things about where a body ends: the parser refuses them.
"""

import asyncio
import re
import zlib
from typing import TYPE_CHECKING

from storage.collect.normalise import begins_as_image

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler

MAX_FIELD = 2**16  # bytes of a header
_MAX_HEAD = MAX_FIELD + 2**14  # bytes of the status line and all headers
_MAX_LINE = 1000  # bytes of a status line that are kept; aiohttp's error messages quote it, escaped twice
_HINTS = re.compile(  # responses of status 1xx, which come before the response
    rb"\A\s*(?:HTTP/[\d.]+[ \t]+1(?!01)\d\d[^\n]*\n(?:[^\r\n][^\n]*\n)*\r?\n\s*)*", re.IGNORECASE
)
_GZIP, FIRST = b"\x1f\x8b", 16  # first bytes of gzip files, and bytes that tell how a body begins
_END = re.compile(rb"\n\r?\n")
_FOLD = re.compile(rb"\n[ \t]+")
_STATUS = re.compile(rb"\s*(?:HTTP/\d+(?:\.\d+)?|ICY)[ \t]+(\d{3})(?!\d)([^\r\n]*)", re.IGNORECASE)
_NAMES = b"Content-Encoding|Content-Length|Location|Retry-After|Transfer-Encoding|X-Robots-Tag"
_HEADER = re.compile(rb"\n(?=[CLRTX])(%b)[ \t]*:([^\n]*)" % _NAMES, re.IGNORECASE)


def repaired(head: bytes) -> bytes:
    """Return a status line with headers, through the empty line, in strict form, with only the headers that we use."""
    status = _STATUS.match(head)
    if not status:
        return head[:_MAX_LINE]
    lines, lengths = [b"HTTP/1.1 %b %b" % (status[1], status[2].strip()[:_MAX_LINE])], set()
    for name, value in _HEADER.findall(_FOLD.sub(b" ", head)):
        if name.lower() == b"content-length":
            lengths.update(filter(None, map(bytes.strip, value.split(b","))))
        else:
            lines.append(b"%b: %b" % (name, value.translate(None, b"\0\r").strip()))
    lines += [b"Content-Length: " + length for length in lengths]
    return b"\r\n".join([*lines, b"", b""])


def tolerant_protocol() -> "ResponseHandler":
    """Return a protocol for aiohttp's connector that repairs responses."""
    from aiohttp import ClientPayloadError
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.http_exceptions import HttpProcessingError

    class Tolerant(ResponseHandler):
        head: bytes | None = b""  # received so far; None after its end

        def data_received(self, data: bytes) -> None:
            for part in self.parts(data):
                super().data_received(part)
            body, error = self._payload, self.exception()
            if error and body and not body.is_eof() and not body.exception():
                body.set_exception(ClientPayloadError(str(error)))  # aiohttp would let its reader wait

        def parts(self, data: bytes) -> list[bytes]:
            """Return what the parser can read now. An error in bytes after a whole body must not cost the head."""
            if self.head is None:
                return [data]
            self.head = data = _HINTS.sub(b"", self.head + data, 1)
            if end := _END.search(data, 0, _MAX_HEAD):
                self.head = None
                return [repaired(data[: end.end()]), data[end.end() :]]
            begin = data[:5].upper()
            is_http = b"HTTP/".startswith(begin) or b"ICY ".startswith(begin[:4])
            if len(data) > _MAX_HEAD or not is_http:
                reason = f"over {_MAX_HEAD} bytes of headers" if is_http else "not HTTP"
                self.set_exception(HttpProcessingError(code=400, message=f"{reason}: {data[:60]!r}"))
                if self.transport:
                    self.transport.close()
            return []

    return Tolerant(asyncio.get_running_loop())


class Unpacker:
    """Decompresses a body in pieces, if it is compressed: its first bytes tell. `encoding` is its Content-Encoding.

    An image is one whatever the Content-Encoding says, and none begins as a gzip or zlib stream.
    """

    def __init__(self, encoding: str):
        self.encoding = encoding.lower()
        self._stream: zlib._Decompress | None = None
        self._has_begun = False

    @property
    def at_end(self) -> bool:
        """False if more of a compressed stream must come."""
        return not self._stream or self._stream.eof

    def unpack(self, data: bytes, limit: int) -> tuple[bytes, bytes]:
        """Return at most `limit` bytes of the body, and data to unpack next. Raises zlib.error for a damaged stream.

        The first `data` must have FIRST bytes, unless the body is shorter.
        """
        if not self._has_begun:
            self._stream, self._has_begun = self._begin(data), True
        if not self._stream:
            return data[:limit], b""
        if self._stream.eof:  # another member of a gzip file, or bytes after it, which are ignored
            if not data.startswith(_GZIP[:1]):
                return b"", b""
            self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
        return self._stream.decompress(data, limit), self._stream.unconsumed_tail or self._stream.unused_data

    def _begin(self, data: bytes) -> "zlib._Decompress | None":
        if data.startswith(_GZIP):
            return zlib.decompressobj(zlib.MAX_WBITS | 16)
        is_zlib = data[:1] and data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
        if is_zlib and ("gzip" in self.encoding or "deflate" in self.encoding):
            return zlib.decompressobj()
        # Some servers leave out the header of zlib.
        headless = "deflate" in self.encoding and not begins_as_image(data)
        return zlib.decompressobj(-zlib.MAX_WBITS) if headless else None
