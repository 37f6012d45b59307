"""Statuses of rows with their explanations, and the exception that carries a status."""

from enum import StrEnum
from http.client import responses
from typing import Self

from storage import manifests, withdrawn


class Status(StrEnum):
    """The outcome of a row. `meaning` explains it. The members include HTTP_400 to HTTP_599."""

    _ignore_ = "code members"
    meaning: str

    def __new__(cls, value: str, meaning: str) -> "Status":
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    OK = manifests.OK, "the image is stored"
    DUPLICATE = "duplicate", "an earlier row of the list has the same URL and caption"
    WITHDRAWN = withdrawn.WITHDRAWN, "its URL, or the same image at another URL, was withdrawn with `vlbert withdraw`"
    BAD_ROW = "bad_row", "the row of the list cannot be read, or has no URL or no caption in its columns"
    EMPTY_CAPTION = "empty_caption", "the caption is empty or has only spaces (`keep_empty_captions`)"
    BAD_URL = "bad_url", "not an absolute http(s) URL with a host and without a user name, or it cannot be parsed"
    BLOCKED_ADDRESS = (
        "blocked_address",
        "the host is, or resolves to, an address that is not public, or the port is neither 80 nor 443",
    )
    DNS = "dns", "the host name does not resolve"
    CONNECT = "connect", "the connection failed, or was lost before an answer came"
    TLS = "tls", "the TLS handshake failed, or the certificate is not valid for this host"
    TIMEOUT = "timeout", "the deadline passed, or the server was silent or too slow for too long"
    HOST_TIMEOUT = (
        "host_timeout",
        "not requested, because its host did not answer other URLs until the shard was done",
    )
    NOAI = "noai", "its `X-Robots-Tag` forbids training: `noai` or `noimageai`"
    NOINDEX = (
        "noindex",
        "its `X-Robots-Tag` forbids an index: `noindex`, `noimageindex` or `none` (`download.obey_noindex`)",
    )
    ROBOTS_TXT = (
        "robots_txt",
        "the `robots.txt` of its server, or of a server that redirects to it, forbids it (`download.obey_robots_txt`)",
    )
    ROBOTS_TXT_FAILED = (
        "robots_txt_failed",
        "`robots.txt` is unavailable (429, 5xx, incomplete): all URLs of its server are forbidden for now",
    )
    BAD_RESPONSE = "bad_response", "the answer is not HTTP, or its content encoding cannot be decoded"
    TOO_MANY_REDIRECTS = "too_many_redirects", "more than five redirects"
    TOO_BIG = "too_big", "more bytes than `max_bytes`, announced or sent"
    SHORT_BODY = "short_body", "the connection ended before the announced end of the body"
    MISSING_FILE = "missing_file", "a local image is missing, is not a regular file or cannot be read (import only)"
    BAD_CAPTION = (
        "bad_caption",
        "the caption of an image in a tar is missing, too long or cannot be read (import only)",
    )
    NOT_IMAGE = (
        "not_image",
        "not an image in a supported format: JPEG, PNG, GIF, WebP, BMP, TIFF; AVIF, HEIC if installed",
    )
    TRUNCATED = "truncated", "the image file ends early or is damaged"
    TOO_MANY_PIXELS = "too_many_pixels", "more pixels than `max_pixels`, or crafted to be costly to decode"
    BAD_GEOMETRY = (
        "bad_geometry",
        "the shorter side is less than `min_side`, or the longer side more than `max_aspect` times the shorter",
    )
    HTTP_OTHER = "http_other", "an HTTP status other than 200 that is not 4xx or 5xx, or a redirect without a target"

    members = vars()
    for code in range(400, 600):
        members[f"HTTP_{code}"] = f"http_{code}", f"HTTP {code} {responses.get(code, '')}".rstrip()


UNREACHABLE = {Status.DNS, Status.CONNECT, Status.TIMEOUT, Status.HOST_TIMEOUT}  # the statuses of an offline machine
_FINAL = {Status.OK, Status.DUPLICATE, Status.WITHDRAWN, Status.BAD_ROW, Status.EMPTY_CAPTION}  # not by a request
NOT_REQUESTED = _FINAL - {Status.OK} | {Status.BAD_URL, Status.BLOCKED_ADDRESS}
_LIMITS = "with another --download.{}, the list makes another dataset"
_HINTS = {
    Status.DUPLICATE: "nothing to do",
    Status.WITHDRAWN: "nothing to do",
    Status.NOAI: "nothing to do: the owner does not want it in training",
    Status.BAD_ROW: "append the corrected row to the list, and collect it again",
    Status.EMPTY_CAPTION: "with --keep_empty_captions, the list makes another dataset",
    Status.BAD_URL: "append the corrected row to the list, and collect it again",
    Status.BLOCKED_ADDRESS: "if you trust the server, add --download.allowed_hosts HOST:PORT and --retry_statuses {}",
    Status.NOINDEX: "if the owner agrees, add --download.no_obey_noindex and --retry_statuses {}",
    Status.ROBOTS_TXT: "if the owner agrees, add --download.no_obey_robots_txt and --retry_statuses {}",
    Status.TOO_BIG: _LIMITS.format("max_bytes"),
    Status.TOO_MANY_PIXELS: _LIMITS.format("max_pixels"),
    Status.BAD_GEOMETRY: _LIMITS.format("min_side or --download.max_aspect"),
}


def hint_for(status: str, is_import: bool = False) -> str:
    """Return what a user can do about a row with this status. Only rows with a URL can be requested again."""
    default = (
        "mend the file, and collect the list as another dataset" if is_import else "--retry_statuses {} tries again"
    )
    return _HINTS.get(Status(status), default).format(status)


def parse_statuses(names: tuple[str, ...]) -> frozenset[Status]:
    """Return the statuses to retry, given their names. `http_4xx` and `http_5xx` stand for all statuses of that class.

    Raises ValueError for an unknown name, and for a status that another request would not change, such as `ok`.
    """
    retryable, statuses = set(Status) - _FINAL, set()
    for name in names:
        prefix = name[:6] if name in ("http_4xx", "http_5xx") else None
        matching = {status for status in retryable if status == name or (prefix and status.startswith(prefix))}
        if not matching:
            known = sorted(status for status in retryable if not status.removeprefix("http_").isdecimal())
            raise ValueError(f"retry_statuses names {name!r}; use {', '.join(known)}, http_4xx, http_5xx, ...")
        statuses |= matching
    return frozenset(statuses)


class Refused(Exception):
    """Raised if an image cannot be stored. The status and the detail say why.

    Attributes:
        retry_after: minimum wait before another attempt, in seconds; None if another attempt is unlikely to succeed
        host: the host that failed; after a redirect, the host that it led to
    """

    def __init__(self, status: Status, detail: str, retry_after: float | None = None, host: str = ""):
        super().__init__(status, detail)
        self.status, self.detail, self.retry_after, self.host = status, detail, retry_after, host

    def bare(self) -> Self:
        """Remove this error's traceback, and return the error. The traceback would keep the image's bytes in memory."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self
