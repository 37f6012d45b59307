"""Members of a shard's tar, as bytes."""

import json
from collections.abc import Callable

import msgpack

Members = dict[str, bytes]


def metadata(**fields: object) -> Callable[[Members], Members]:
    """The .json member with other values; `...` leaves the field out."""

    def change(members: Members) -> Members:
        values = json.loads(members["json"]) | fields
        text = json.dumps({name: value for name, value in values.items() if value is not ...})
        return members | {"json": text.encode()}

    return change


def packed(**fields: object) -> Callable[[Members], Members]:
    """The .mp member with other values; `...` leaves the field out."""

    def change(members: Members) -> Members:
        values = msgpack.unpackb(members["mp"]) | fields
        return members | {"mp": msgpack.packb({name: value for name, value in values.items() if value is not ...})}

    return change


def member(name: str, data: bytes) -> Callable[[Members], Members]:
    return lambda members: members | {name: data}
