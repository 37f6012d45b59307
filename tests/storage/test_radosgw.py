"""What only a real S3 decides: races, credentials and clocks. Ceph's, beside the tests that run on every storage."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ceph import Gateway
from s3 import environment
from seeded import shard_of
from tools import skip_without

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.claims import Claims
from storage.inventory import Inventory
from storage.object_store import ObjectStore, StorageUnreachable, open_store
from storage.verify import verify

pytestmark = pytest.mark.far
WRITERS, SHARDS = 4, [f"{number:05}" for number in range(8)]
TOKEN = 10  # seconds after which a session expires


def in_processes(work: Callable, *arguments: tuple, variables: tuple[dict[str, str], ...] = ()) -> None:
    """One process of its own for each of these arguments, all at once; `variables` of each beside the environment."""
    context, processes = multiprocessing.get_context("spawn" if variables else "fork"), []
    try:
        for given, its in zip(arguments, variables or [{}] * len(arguments), strict=True):
            process = context.Process(target=work, args=given)
            with environment(**its):
                process.start()
            processes.append(process)
        for process in processes:
            process.join(120)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(arguments)


def meet(store: ObjectStore, writer: int) -> None:
    """Go on when all writers are here."""
    store.put(f"here/{writer}", b"")
    end = time.monotonic() + 60
    while len(list(store.list("here/"))) < WRITERS:
        assert time.monotonic() < end


def race(root: str, writer: int, file: Path) -> None:
    store, won = open_store(root), []
    own = {size: (b"%d" % writer) * size for size in (10, 300_000, 9_000_000)}
    meet(store, writer)
    for size, rounds in ((10, 60), (300_000, 20), (9_000_000, 2)):
        for number in range(rounds):
            path = f"race/{size}-{number}"
            if store.put(path, own[size], if_absent=True):
                won.append(path)
    file.write_text(json.dumps(won))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_of_four_processes_that_put_one_object_one_wins(radosgw, tmp_path, scheme):
    root, files = f"s3://bucket/{tmp_path.name}", [tmp_path / str(writer) for writer in range(WRITERS)]
    with environment(**radosgw.variables(scheme)):
        in_processes(race, *[(root, writer, files[writer]) for writer in range(WRITERS)])
        won = [json.loads(file.read_text()) for file in files]
        store = open_store(root)
        objects = [info.path for info in store.list("race/")]
        assert len(objects) == 82
        assert sorted(path for paths in won for path in paths) == objects  # each has one winner
        for writer, paths in enumerate(won):
            assert {byte for path in paths for byte in store.get(path)} <= {ord(str(writer))}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_large_objects_of_every_form_are_put_whole(radosgw, tmp_path, scheme):
    data, file = os.urandom(20_000_000), tmp_path / "file"
    file.write_bytes(data)
    forms = {"bytes": data, "file": file}
    with environment(**radosgw.variables(scheme)):
        store = open_store(f"s3://bucket/{tmp_path.name}")
        for form, content in forms.items():
            for if_absent in (False, True):  # in parts, and in one request
                path = f"{form}/{if_absent}"
                assert store.put(path, content, if_absent=if_absent) is True
                assert store.get(path) == data
                assert store.get_range(path, 8_388_607, 3) == data[8_388_607:8_388_610]
        assert list(store.leftovers()) == []


def make_shards(root: str, file: Path | None = None, after: Callable[[str], object] = lambda shard: None) -> list[str]:
    """A worker: commits what it can claim of SHARDS; the shards that it began, which are written to `file`, too."""
    catalog, begun = Catalog(open_store(root), "captions"), []

    def pending(shards: list[str]) -> list[str]:
        done = set(catalog.shards("images"))
        return [shard for shard in shards if shard not in done]

    with Claims(catalog.store, catalog.path("images", "")) as claims:
        for shard, _ in claims.each(SHARDS, pending, print):
            begun.append(shard)
            time.sleep(0.2)  # time to be overtaken
            assert commit_shard(catalog, "images", shard, *shard_of(int(shard)), {})
            after(shard)
    if file:
        file.write_text(json.dumps(begun))
    return begun


def check_complete(root: str) -> None:
    store = open_store(root)
    assert Catalog(store, "captions").shards("images") == SHARDS
    assert list(verify(Inventory(store))) == []
    assert not [info.path for info in store.list() if "/claims/" in info.path]


def test_each_shard_is_made_once_by_machines_whose_clocks_are_ten_minutes_apart(radosgw, tmp_path):
    root, files = f"s3://bucket/{tmp_path.name}", [tmp_path / str(worker) for worker in range(3)]
    with environment(**radosgw.variables()):
        in_processes(make_shards, *[(root, file) for file in files], variables=(clock(-5), clock(0), clock(5)))
        begun = [json.loads(file.read_text()) for file in files]
        assert sorted(shard for shards in begun for shard in shards) == SHARDS
        assert all(begun), begun
        check_complete(root)


def clock(minutes: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong by so much."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        skip_without("far", "faketime is not installed; Debian: faketime")
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{minutes:+}m"} if minutes else {}


@pytest.mark.parametrize("wrong", [{"AWS_SECRET_ACCESS_KEY": "other"}, {"AWS_ACCESS_KEY_ID": "nobody"}])
@pytest.mark.parametrize("write", [True, False])
def test_wrong_credentials_are_named_in_one_line(radosgw, tmp_path, wrong, write):
    with (
        environment(**radosgw.variables() | wrong),
        pytest.raises(StorageUnreachable, match=f"s3://bucket/.* at {radosgw.http} .*and the credentials") as refused,
    ):
        open_store(f"s3://bucket/{tmp_path.name}", write=write)
    assert refused.value.http_status == 403
    assert "\n" not in str(refused.value)
    assert "other" not in str(refused.value)


def as_variables(session: dict) -> dict[str, str]:
    names = ("AWS_ACCESS_KEY_ID", "AccessKeyId"), ("AWS_SECRET_ACCESS_KEY", "SecretAccessKey")
    return {name: session[key] for name, key in (*names, ("AWS_SESSION_TOKEN", "SessionToken"))}


def test_a_session_that_expires_in_a_run_stops_it_and_the_next_one_completes_the_work(radosgw, tmp_path):
    root = f"s3://bucket/{tmp_path.name}"
    with environment(**radosgw.variables()):
        with (
            environment(**as_variables(radosgw.session(TOKEN))),
            pytest.raises(
                StorageUnreachable, match=rf"{root}.*session token may have expired.*what is committed stays"
            ),
        ):
            make_shards(root, after=lambda shard: time.sleep(TOKEN))
        catalog = Catalog(open_store(root), "captions")
        done = catalog.shards("images")
        assert 0 < len(done) < len(SHARDS)
        with environment(**as_variables(radosgw.session(600))):
            assert sorted([*make_shards(root), *done]) == SHARDS
        for info in catalog.store.list("captions/images/claims/"):  # could not be released, and expires
            catalog.store.delete(info.path)
        check_complete(root)


class Provider(ThreadingHTTPServer):
    """Hands out sessions, as containers and instances of a cloud get them; each ends after TOKEN seconds."""

    def __init__(self, gateway: Gateway):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gateway, self.sessions, self.began = gateway, [], -TOKEN


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        if time.monotonic() - self.server.began > TOKEN / 2:
            self.server.began = time.monotonic()
            self.server.sessions.append(self.server.gateway.session(TOKEN))
        session = self.server.sessions[-1]
        answer = {"AccessKeyId": session["AccessKeyId"], "SecretAccessKey": session["SecretAccessKey"]}
        answer |= {"Token": session["SessionToken"], "Expiration": f"{session['Expiration']:%Y-%m-%dT%H:%M:%SZ}"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def without_keys(radosgw, tmp_path, monkeypatch) -> Iterator[None]:
    """The gateway's endpoint in the environment, and no credentials but what the test adds."""
    with environment(**radosgw.variables(), AWS_SHARED_CREDENTIALS_FILE=str(tmp_path / "credentials")):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        yield
        monkeypatch.undo()


def test_a_session_is_renewed_by_its_provider(without_keys, radosgw, tmp_path):
    provider = Provider(radosgw)
    threading.Thread(target=provider.serve_forever, args=(0.05,), daemon=True).start()
    try:
        with environment(AWS_CONTAINER_CREDENTIALS_FULL_URI=f"http://127.0.0.1:{provider.server_port}/"):
            root = f"s3://bucket/{tmp_path.name}"
            make_shards(root, after=lambda shard: time.sleep(TOKEN / 7))
            check_complete(root)
    finally:
        provider.shutdown()
        provider.server_close()
    assert len(provider.sessions) > 1
