"""storage.safe_pickle: plain values round trip, and no file costs more than its size."""

import json
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.weights.torch_pickle import read_tensors
from storage.safe_pickle import Hostile, read_pickle
from vlbert.datasets.refcoco import read_expressions

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(0, 99), inner),
    max_leaves=20,
)


@settings(max_examples=60)
@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_round_trip(value: object, protocol: int):
    data = pickle.dumps(value, protocol)
    try:
        found, end = read_pickle(b"before" + data + b"behind", start=6)
    except Hostile as error:
        refused = str(error)
        assert protocol < 3, "later ones have an opcode for bytes"
        assert refused in ("_codecs.encode", "__builtin__.bytes")
        return
    assert (found, end) == (value, 6 + len(data))
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal


def doubled(first: bytes, each: Callable[[int], bytes], levels: int = 60) -> bytes:
    """A value, put into the memo, and one above another that holds the last one twice."""
    return first + b"q\x00" + b"".join(each(level) + b"q" + bytes([level + 1]) for level in range(levels))


LISTS = doubled(b"]", lambda level: b"](h" + bytes([level]) + b"h" + bytes([level]) + b"e")
TUPLES = doubled(b")", lambda level: b"h" + bytes([level, ord("h"), level, 0x86]))
U4, U8 = struct.Struct("<I"), struct.Struct("<Q")
SAME_HASH = (
    b"}(" + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(30_000)) + b"u"
)
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n)\x87R"

# Each is to be one reference of a refs file, and one weight.
BOMBS = {
    "lists whose repr is 2^60 long": LISTS,
    "a tuple whose hash overflows the stack": b"})" + b"\x85" * 200_000 + b"Ns",
    "lists nested deep": b"]" * 100_000 + b"a" * 99_999,
    "a list that holds itself": b"]q\x00h\x00a",
    "a far place in the memo": b"Nr" + U4.pack(2**27),
    "a long text": b"\x8d" + U8.pack(2**40),
    "a long bytearray": b"\x96" + U8.pack(2**33),
    "a number of 2^31 bytes": b"\x8b" + U4.pack(2**31 - 1),
    "a number of 10^6 bytes": b"\x8b" + U4.pack(10**6) + b"\x01" * 10**6,
    "a number of 10^5 digits": b"I" + b"9" * 10**5 + b"\n",
    "a name of 10^6 letters": b"c" + b"a" * 10**6 + b"\nb\n",
    "a name that a terminal obeys": b"c\x1b[2J\nb\n",
    "whole numbers of one hash": SAME_HASH,
    "a set": b"\x8f",
    "an extension": b"\x82\x01",
    "a persistent id": b"P0\n",
    "an instance": b"(ios\nsystem\n",
    "a new object": b"cos\nsystem\n)\x81",
    "a buffer from outside": b"\x97",
    "a call of a text": b"U\x01a)R",
    "a pop of nothing": b"1",
    "a change of a list": b"]Nb",
}
# More, of weights alone.
ENCODED = b"c_codecs\nencode\nq\x01X" + U4.pack(10**6) + b"a" * 10**6 + b"U\x06latin1\x86q\x02"
WEIGHT_BOMBS = {
    "one text encoded again and again": b"]" + ENCODED + b"(" + b"h\x01h\x02R" * 3000 + b"l",
    "one list made an OrderedDict again and again": b"]ccollections\nOrderedDict\nq\x01]("
    + b"".join(b"](U\x08%08dNe" % number for number in range(30_000))
    + b"e\x85q\x02("
    + b"h\x01h\x02R" * 3000
    + b"l",
    "an array larger than its bytes": ARRAY
    + b"(K\x01J"
    + U4.pack(2**30)
    + b"\x85cnumpy\ndtype\nU\x02f4\x85R\x89U\x04abcdtb",
    "an array of texts": ARRAY + b"(K\x01)cnumpy\ndtype\nU\x02U4\x85R\x89U\x04abcdtb",
}


@pytest.mark.parametrize(
    ("bomb", "says"),
    [
        (LISTS, "again and again"),
        (TUPLES, "again and again"),
        (b"}" + TUPLES + b"Ns", "a tuple is the key of a dict"),
        (b"})Ns", "a tuple is the key of a dict"),
        (b"()Nd", "a tuple is the key of a dict"),
        (b"}()Nu", "a tuple is the key of a dict"),
        (SAME_HASH, "a int is the key of a dict"),
        (b"]" * 65 + b"a" * 64, "nested more than 64 deep"),
        (b"(" * 70, "nested more than 64 deep"),
        (BOMBS["a list that holds itself"], "holds itself"),
        (BOMBS["a far place in the memo"], "index of 134217728 in the memo"),
        (b"Np134217728\n", "index of 134217728 in the memo"),
        (b"\x8a\x41" + bytes(65), "a whole number of 65 bytes"),
        (b"I" + b"1" * 201 + b"\n", "a number or name of 201 bytes"),
        (b"U\x05abc", "5 bytes at byte 2, of which 4 are there"),
        (b"T\xff\xff\xff\xff", "-1 bytes"),
        (b"\x8f", "0x8f, no opcode"),
        (b"}(U\x01aNU\x01bu", "a key without a value"),
    ],
)
def test_each_limit_is_named(bomb: bytes, says: str):
    with pytest.raises(ValueError, match=re.escape(says)):
        read_pickle(bomb + b".")


def test_values_at_the_limits_are_read():
    deep, number = b"]" * 64 + b"a" * 63 + b".", b"\x8a\x40" + b"\x01" * 64 + b"."
    assert repr(read_pickle(deep)[0]) == "[" * 64 + "]" * 64
    assert read_pickle(number)[0] == int.from_bytes(b"\x01" * 64, "little")
    assert read_pickle(b"]q\x01]h\x01a.")[0] == [[]]


@pytest.mark.parametrize("side", [10, 11])
def test_a_tensor_ends_where_its_storage_does(tmp_path: Path, side: int):
    members = {"data.pkl": tensor_pickle(10, (side,), (1,)), "data/0": bytes(40)}
    file = torch_zip(tmp_path / "w.pth", members)
    if side == 10:
        assert read_tensors(file).tensors["w"].tolist() == [0] * 10
        return
    with pytest.raises(ValueError, match="a tensor outside its storage of 10 numbers"):
        read_tensors(file)


def refcoco(folder: Path, refs: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "refs(unc).p").write_bytes(refs)
    image = {"id": 1, "file_name": "a.jpg", "width": 10, "height": 10}
    box = {"id": 1, "image_id": 1, "bbox": [1, 1, 5, 5]}
    (folder / "instances.json").write_text(json.dumps({"images": [image], "annotations": [box]}))
    return folder


def torch_zip(file: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"archive/{name}", content)
    return file


def tensor_pickle(count: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str = "FloatStorage") -> bytes:
    """As torch writes {"w": a tensor}."""
    plain = [pickle.dumps(value, 2)[2:-1].replace(b"q\x00", b"") for value in (shape, strides)]
    storage = b"(U\x07storagectorch\n" + kind.encode() + b"\nU\x010U\x03cpuJ" + U4.pack(count) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + b"".join(plain) + b"\x89NtR"
    return b"\x80\x02}U\x01w" + tensor + b"s."


READ_IN_A_CHILD = """
import json, resource, sys, time
from pathlib import Path
from detectors.weights.torch_pickle import read_tensors
from vlbert.datasets.refcoco import read_expressions

readers = {"refs": read_expressions, "weights": read_tensors}
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20,) * 2)
for line in sys.stdin:
    name, reader, file = json.loads(line)
    start = time.process_time()
    try:
        readers[reader](Path(file))
        found = "taken"
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    print(json.dumps([name, reader, found, time.process_time() - start]), flush=True)
"""


def test_no_file_costs_more_than_its_size(tmp_path: Path):
    """All are refused by name, in a second and 200 MB, with a message that fits a screen."""
    cases = []
    for number, (name, bomb) in enumerate((BOMBS | WEIGHT_BOMBS).items()):
        file = tmp_path / f"{number}.pkl"
        file.write_bytes(b"\x80\x02}U\x05model}U\x01w" + bomb + b"ss.")
        cases.append((name, "weights", file))
        if name in BOMBS:
            cases.append((name, "refs", refcoco(tmp_path / f"refs{number}", b"\x80\x02](" + bomb + b"e.")))
            # The same in a file of torch.
            zipped = torch_zip(tmp_path / f"{number}.pth", {"data.pkl": b"\x80\x02}U\x01w" + bomb + b"s."})
            cases.append((name, "weights", zipped))
    numbers = b"\x00" * 40
    for name, pkl, members in (
        ("a tensor larger than its storage", tensor_pickle(10, (11,), (1,)), {"data/0": numbers}),
        ("a tensor of one number again and again", tensor_pickle(10, (2**20, 2**10), (0, 0)), {"data/0": numbers}),
        ("a storage larger than its member", tensor_pickle(2**20, (2**20,), (1,)), {"data/0": numbers}),
        ("a storage of no member", tensor_pickle(10, (10,), (1,)), {}),
        ("a negative count", tensor_pickle(2**32 - 1, (3,), (1,)), {"data/0": numbers}),
        ("another storage", tensor_pickle(10, (3,), (1,), "ComplexFloatStorage"), {"data/0": numbers}),
    ):
        cases.append((name, "weights", torch_zip(tmp_path / f"{name}.pth", {"data.pkl": pkl} | members)))
    large = {"data.pkl": tensor_pickle(2**28, (2**28,), (1,)), "data/0": bytes(2**28)}
    squeezed = torch_zip(tmp_path / "squeezed.pth", large, zipfile.ZIP_DEFLATED)
    cases.append(("a member of 2^28 zeros, compressed", "weights", squeezed))
    lines = "".join(json.dumps([name, reader, str(file)]) + "\n" for name, reader, file in cases)
    child = [sys.executable, "-c", READ_IN_A_CHILD]
    run = subprocess.run(child, input=lines, capture_output=True, text=True, timeout=240)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(cases), (cases[len(answers)], run.returncode, run.stderr[-500:])
    for (name, reader, file), (_, _, found, seconds) in zip(cases, answers, strict=True):
        refused = found.startswith("ValueError: ") and str(file) in found and len(found) < 700 and found.isprintable()
        assert refused, (name, reader, found[:300])
        assert seconds < 1, (name, reader, seconds)


# --- damage -----------------------------------------------------------------------------------------------------------

SENTENCES = [{"sent_id": n, "sent": f"the {n}", "raw": f"The {n}", "tokens": ["the", str(n)]} for n in range(2)]
REFS = [{"ref_id": 1, "image_id": 1, "ann_id": 1, "split": "val", "sentences": SENTENCES, "sent_ids": [0, 1]}]
DAMAGE = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3)


def damaged(data: bytes, damage: list[tuple[float, int]], keep: float) -> bytes:
    """`data` with some of its bytes changed, and its end cut off where `keep` is below 1."""
    data = bytearray(data[: round(len(data) * keep)] if keep < 1 else data)
    for place, change in damage if data else ():
        data[int(place * len(data))] ^= change
    return bytes(data)


@settings(max_examples=60)
@given(st.sampled_from(range(pickle.HIGHEST_PROTOCOL + 1)), DAMAGE, st.floats(0.5, 1.5))
def test_a_damaged_refs_file_is_read_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, protocol: int, damage: list[tuple[float, int]], keep: float
):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    whole = pickle.dumps(REFS, protocol)
    assert set(read_expressions(refcoco(folder, whole))) == {"val"}
    try:
        read_expressions(refcoco(folder, damaged(whole, damage, keep)))
    except ValueError as error:
        refused = str(error)
        assert str(folder) in refused


def saved(kind: str, file: Path) -> bytes:
    weights = OrderedDict((f"layer{n}.weight", torch.arange(6.0).reshape(2, 3) + n) for n in range(3))
    if kind == "numpy":
        file.write_bytes(pickle.dumps({"model": {name: tensor.numpy() for name, tensor in weights.items()}}, 2))
    else:
        weights["tied"] = weights["layer0.weight"]
        weights["turned"] = weights["layer1.weight"].t()
        weights["parameter"] = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        torch.save(weights, file, _use_new_zipfile_serialization=kind == "zip")
    return file.read_bytes()


@settings(max_examples=60)
@given(st.sampled_from(["zip", "old", "numpy"]), DAMAGE, st.floats(0.5, 1.5))
def test_a_damaged_weight_file_is_read_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, damage: list[tuple[float, int]], keep: float
):
    file = tmp_path_factory.getbasetemp() / "damaged weights"
    whole = saved(kind, file)
    expected = read_tensors(file).tensors
    file.write_bytes(damaged(whole, damage, keep))
    try:
        found = read_tensors(file).tensors
    except ValueError as error:
        refused = str(error)
        assert str(file) in refused
        return
    if kind == "zip":  # it has checksums of its own
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("kind", ["zip", "old"])
def test_tensors_are_as_torch_loads_them(tmp_path: Path, kind: str):
    file = tmp_path / "w.pth"
    saved(kind, file)
    numbers = {
        str(dtype): torch.arange(7).to(dtype) for dtype in (torch.float64, torch.float16, torch.bool, torch.uint8)
    }
    numbers |= {"part": torch.arange(10.0)[3:7], "none": torch.zeros(0, 3), "one": torch.tensor(3)}
    best = {"best": np.float64(3), "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}
    whole = torch.load(file, weights_only=True) | numbers
    torch.save({"model": whole, "epoch": best}, file, _use_new_zipfile_serialization=kind == "zip")
    found = read_tensors(file)
    assert found.tensors.keys() == whole.keys()
    assert found.beside == ("epoch",)
    for name, tensor in whole.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name
    assert found.tensors["tied"].data_ptr() == found.tensors["layer0.weight"].data_ptr()
