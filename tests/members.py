"""Members of a shard's tar, as bytes."""

import functools
import json
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
