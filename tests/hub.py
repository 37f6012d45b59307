"""A folder that a local server gives out as the Hugging Face hub does."""

import functools
import http.server
import json
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants


class Hub(http.server.SimpleHTTPRequestHandler):
    """Files of a folder as the hub lists and gives them out, /<owner>/<name>/resolve/<revision>/<file>."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    requested: list[str] = []

    def translate_path(self, path: str) -> str:
        return super().translate_path(re.sub(rf"/resolve/(main|{self.commit})/", "/", path))

    def do_GET(self) -> None:
        self.requested.append(self.path)
        name = re.fullmatch(rf"/api/models/(.+)/(revision/main|tree/{self.commit})(\?.*)?", self.path)
        if name is None:
            return super().do_GET()
        folder = Path(self.directory, name[1])
        if not folder.is_dir():
            return self.send_error(404)
        files = [file for file in folder.rglob("*") if file.is_file()]
        tree = [
            {
                "type": "file",
                "path": file.name,
                "size": file.stat().st_size,
                "oid": f"{zlib.crc32(file.read_bytes()):x}",
            }
            for file in files
        ]
        return self.answer({"id": name[1], "sha": self.commit} if name[2] == "revision/main" else tree)

    def answer(self, content: dict | list) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_error(self, code: int, *_: object) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", "RepoNotFound" if "/none/" in self.path else "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def end_headers(self) -> None:
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{zlib.crc32(self.path.encode()):x}"')
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, which a local server gives out meanwhile; HF_ENDPOINT sets the same two constants."""
    root.mkdir()
    Hub.requested.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, directory=str(root)))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    try:
        yield root
    finally:
        server.shutdown()
        server.server_close()
