"""URLs for messages and logs, without passwords and signed queries."""

import re

_LONGEST = 200  # characters of a URL that are shown
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:)?//")
_AUTHORITY = re.compile(r"(?:[^:@]*|\[[^\]@]*\])(?::\d*)?")
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]*")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s'\"<>?]*=[^\s'\"<>]*")


def display_url(url: str) -> str:
    """Scheme, host, port and path, cut to 200 characters: no user name or password; `?…` stands for a query."""
    scheme, rest = "", url
    if found := _SCHEME.match(url.lstrip()):
        scheme, rest = found[0], url.lstrip()[found.end() :]
    main, mark, _ = rest.partition("?")
    main = main.partition("#")[0]
    # A full-width @ is one to some parsers.
    authority, slash, path = main.replace("\N{FULLWIDTH COMMERCIAL AT}", "@").partition("/")
    authority = authority.rpartition("@")[2]
    if scheme and not _AUTHORITY.fullmatch(authority):
        authority, slash, path = "…", "", ""  # a password with a slash in it looks like a host with a wrong port
    return f"{scheme}{authority}{slash}{path}"[:_LONGEST] + ("?…" if mark else "")


def redacted(text: str) -> str:
    """The text with each URL in it as `display_url` has it, and each `?name=value` as `?…`."""
    return _QUERY.sub("?…", _URL.sub(lambda found: display_url(found[0]), text))
