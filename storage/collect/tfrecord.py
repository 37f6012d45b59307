"""The records of a .tfrecord file that are tf.train.Example messages, as img2dataset writes them.

A record is the length of its data (8 bytes), a checksum of the length, the data, and a checksum of the data: its
CRC-32C, rotated and shifted (tensorflow.org, "TFRecord and tf.train.Example"). An Example is a protocol buffer that
maps names to lists of bytes, floats or integers (tensorflow/core/example/example.proto).
"""

import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

_HEAD = struct.Struct("<QI")
_MAX_RECORD = 2**28  # bytes
_CHUNK = 256  # bytes, whose checksums are computed side by side


def read_examples(
    stream: BinaryIO, where: str, wanted: Callable[[dict[str, memoryview]], bool] = lambda example: True
) -> Iterator[dict[str, memoryview]]:
    """The bytes of each wanted Example by name; the checksums of others are not computed.

    ValueError names the file and the byte at which it is damaged or ends early.
    """
    at = 0
    while head := stream.read(_HEAD.size):
        place = f"{where} at byte {at}"
        length = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else 0
        data = stream.read(length + 4) if length <= _MAX_RECORD else b""
        if len(head) < _HEAD.size or len(data) < length + 4:
            raise ValueError(f"{place} ends early or is damaged; copy it again, or run img2dataset again")
        try:
            example = _example(memoryview(data)[:-4])
            taken = wanted(example)
            if taken and masked_crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
                raise ValueError("its checksum is another")
        except ValueError as error:
            raise ValueError(f"{place} is damaged ({error}); copy it again, or run img2dataset again") from error
        if taken:
            yield example
        at += len(head) + len(data)


def _example(message: memoryview) -> dict[str, memoryview]:
    """The first value of each feature that is a list of bytes."""
    found = {}
    for features in _fields(message, 1):
        for feature in _fields(features, 1):
            name = b"".join(_fields(feature, 1))
            for values in (one for kind in _fields(feature, 2) for one in _fields(kind, 1)):
                found[name.decode()] = next(_fields(values, 1), memoryview(b""))
    return found


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
    """The fields with this number that are bytes or messages; ValueError if it is no protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 2:
            length, at = _varint(message, at)
            end = at + length
        elif tag & 7 == 0:
            _, end = _varint(message, at)
        else:
            end = at + {1: 8, 5: 4}.get(tag & 7, len(message))
        if end > len(message):
            raise ValueError("it is no tf.train.Example")
        if tag == number << 3 | 2:
            yield message[at:end]
        at = end


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift, byte in zip(range(0, 64, 7), message[at : at + 10], strict=False):
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + shift // 7 + 1
    raise ValueError("it is no tf.train.Example")


# --- the checksum -----------------------------------------------------------------------------------------------------


def _behind_zeros(crc: np.ndarray, count: int) -> np.ndarray:
    for _ in range(count):
        crc = _TABLE[crc & 255] ^ crc >> 8
    return crc


_TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    _TABLE = np.where(_TABLE & 1, _TABLE >> 1 ^ np.uint32(0x82F63B78), _TABLE >> 1)  # Castagnoli's polynomial
# The checksum is linear: that of a chunk further on is a XOR of these, by the four bytes of that before.
_FURTHER = [_behind_zeros(np.arange(256, dtype=np.uint32) << shift, _CHUNK).tolist() for shift in (0, 8, 16, 24)]


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C of at least 4 bytes as these files have it: 1 ms for 100 kB."""
    padded = np.zeros(-len(data) % _CHUNK + len(data), np.uint8)  # zeros in front change nothing
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    padded[-len(data) :][:4] ^= 255
    crcs = np.zeros(len(padded) // _CHUNK, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(-1, _CHUNK).T):
        crcs = _TABLE[(crcs ^ column) & 255] ^ crcs >> 8
    crc = 0
    low, second, third, high = _FURTHER
    for one in crcs.tolist():
        crc = low[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ high[crc >> 24] ^ one
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
