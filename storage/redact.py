"""Redaction of URLs in messages and logs: removes passwords, and query strings because they may contain signatures."""

import re

_MAX_LENGTH = 200  # characters of a URL that are shown
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)?//")
_AUTHORITY = re.compile(r"(?:[^:@]*|\[[^\]@]*\])(?::\d*)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s'\"<>]*")  # a longer scheme would make the search quadratic
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s'\"<>?]*=[^\s'\"<>]*")


def display_url(url: str) -> str:
    """Return the scheme, host, port and path of a URL, cut to 200 characters. A query string is shown as `?…`."""
    scheme, rest = "", url
    if match := _SCHEME.match(url.lstrip()):
        scheme, rest = match[0], url.lstrip()[match.end() :]
    main, mark, _ = rest.partition("?")
    main = main.partition("#")[0]
    # Some parsers accept a full-width @.
    authority, slash, path = main.replace("\N{FULLWIDTH COMMERCIAL AT}", "@").partition("/")
    authority = authority.rpartition("@")[2]
    if scheme and not _AUTHORITY.fullmatch(authority):
        authority, slash, path = "…", "", ""  # a password with a slash in it looks like a host with a wrong port
    return f"{scheme}{authority}{slash}{path}"[:_MAX_LENGTH] + ("?…" if mark else "")


def redacted(text: str) -> str:
    """Return the text with each URL replaced by its `display_url`, and each `?name=value` by `?…`."""
    return _QUERY.sub("?…", _URL.sub(lambda match: display_url(match[0]), text))
