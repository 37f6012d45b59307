"""What can become of a row: each status with the sentence that people read, and the error that carries one."""

from enum import StrEnum
from http import HTTPStatus
from typing import Self

from storage import manifests, withdrawn

_HTTP_NAMES = {status.value: status.phrase for status in HTTPStatus}


class Status(StrEnum):
    """What became of a row, with its meaning in a sentence. HTTP_400 to HTTP_599 are members, too."""

    _ignore_ = ("code", "members")
    meaning: str

    def __new__(cls, value: str, meaning: str) -> "Status":
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    OK = manifests.OK, "the image is stored"
    DUPLICATE = "duplicate", "an earlier row of the list has the same URL and caption"
    WITHDRAWN = withdrawn.WITHDRAWN, "its URL, or the same image from another one, was withdrawn: `vlbert withdraw`"
    BAD_ROW = "bad_row", "the row of the list cannot be read, or has no URL and caption in its columns"
    BAD_URL = "bad_url", "not an absolute http(s) URL with a host and without user name, or one that cannot be parsed"
    BLOCKED_ADDRESS = (
        "blocked_address",
        "the host is, or resolves to, an address that is not public, or the port is neither 80 nor 443",
    )
    DNS = "dns", "the host name does not resolve"
    CONNECT = "connect", "no connection, or the connection was lost before an answer came"
    TLS = "tls", "the TLS handshake failed, or the certificate does not hold for this host"
    TIMEOUT = "timeout", "the deadline passed, or the server was silent or too slow for too long"
    HOST_TIMEOUT = (
        "host_timeout",
        "not requested: its host had answered no other URL, and did not until the shard was done",
    )
    NOAI = "noai", "its `X-Robots-Tag` forbids training with it: `noai` or `noimageai`"
    NOINDEX = (
        "noindex",
        "its `X-Robots-Tag` asks for no index: `noindex`, `noimageindex` or `none` (`download.obey_noindex`)",
    )
    ROBOTS_TXT = (
        "robots_txt",
        "the `robots.txt` of its server, or of one on its way, forbids it (`download.obey_robots_txt`)",
    )
    ROBOTS_TXT_FAILED = (
        "robots_txt_failed",
        "`robots.txt` is unavailable (429, 5xx or half a file): for now, that forbids all URLs of its server",
    )
    BAD_RESPONSE = "bad_response", "the answer is not HTTP, or its content encoding cannot be undone"
    TOO_MANY_REDIRECTS = "too_many_redirects", "more than five redirects"
    TOO_BIG = "too_big", "more bytes than `max_bytes`, announced or sent"
    SHORT_BODY = "short_body", "the connection ended before the whole announced body had come"
    MISSING_FILE = "missing_file", "a local image that is not there, is no regular file or cannot be read (import only)"
    BAD_CAPTION = (
        "bad_caption",
        "the caption of an image of a tar is missing, too long or cannot be read (import only)",
    )
    NOT_IMAGE = "not_image", "not an image in a format that is read: JPEG, PNG, GIF, WebP, BMP"
    TRUNCATED = "truncated", "the image file ends early or is damaged"
    TOO_MANY_PIXELS = "too_many_pixels", "more pixels than `max_pixels`, or made to be costly to decode"
    BAD_GEOMETRY = (
        "bad_geometry",
        "the shorter side is under `min_side`, or one side over `max_aspect` times the other",
    )
    HTTP_OTHER = "http_other", "an HTTP status other than 200 that is not 4xx or 5xx, or a redirect without a target"

    members = vars()
    for code in range(400, 600):
        members[f"HTTP_{code}"] = f"http_{code}", f"HTTP {code} {_HTTP_NAMES.get(code, '')}".rstrip()

    @classmethod
    def of_http(cls, code: int) -> "Status":
        """The status of an answer that is neither an image nor a redirect."""
        return cls(f"http_{code}") if 400 <= code < 600 else cls.HTTP_OTHER


UNREACHABLE = {Status.DNS, Status.CONNECT, Status.TIMEOUT, Status.HOST_TIMEOUT}  # also while this machine is offline
NOT_REQUESTED = {Status.DUPLICATE, Status.WITHDRAWN, Status.BAD_ROW, Status.BAD_URL, Status.BLOCKED_ADDRESS}
_NEVER_AGAIN = {Status.OK, Status.DUPLICATE, Status.WITHDRAWN, Status.BAD_ROW}  # what no request would change


def parse_statuses(names: tuple[str, ...]) -> frozenset[Status]:
    """The statuses of failed rows that these names, or `http_4xx` and `http_5xx`, mean; ValueError for another name."""
    failed, found = set(Status) - _NEVER_AGAIN, set()
    for name in names:
        classes = name[:6] if name in ("http_4xx", "http_5xx") else None
        matching = {one for one in failed if one == name or (classes and one.startswith(classes))}
        if not matching:
            known = sorted(one for one in failed if not one.removeprefix("http_").isdecimal())
            raise ValueError(f"retry_statuses names {name!r}, must be of {', '.join(known)}, http_4xx, http_5xx, ...")
        found |= matching
    return frozenset(found)


class Refused(Exception):
    """An image that is not stored: its status, and more about it in `detail`.

    retry_after  seconds, at least, after which another attempt may succeed; None: none will
    host         that failed, after redirects
    """

    def __init__(self, status: Status, detail: str, retry_after: float | None = None, host: str = ""):
        super().__init__(status, detail)
        self.status, self.detail, self.retry_after, self.host = status, detail, retry_after, host

    def bare(self) -> Self:
        """The same without its traceback, whose frames hold the image's bytes."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self
