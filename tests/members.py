"""Tars, and members of a shard's tar, as bytes."""

import functools
import io
import json
import tarfile
from collections.abc import Callable

import msgpack

Members = dict[str, bytes]


def _changed(name: str, read: Callable, write: Callable, **fields: object) -> Callable[[Members], Members]:
    """The member with other values; `...` leaves the field out."""

    def change(members: Members) -> Members:
        values = read(members[name]) | fields
        return members | {name: write({field: value for field, value in values.items() if value is not ...})}

    return change


metadata = functools.partial(_changed, "json", json.loads, lambda values: json.dumps(values).encode())
packed = functools.partial(_changed, "mp", msgpack.unpackb, msgpack.packb)


def member(name: str, data: bytes) -> Callable[[Members], Members]:
    return lambda members: members | {name: data}


def tar_of(members: list[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT, **fields: object) -> bytes:
    """A tar that other software wrote."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            for field, value in (fields | {"size": len(data)}).items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()
