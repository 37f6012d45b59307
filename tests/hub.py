"""A folder that a local server gives out as the Hugging Face Hub does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import flask  # comes with moto[server]
import pytest
from huggingface_hub import constants
from werkzeug.serving import make_server


class Hub:
    """What is there of every model, and the paths that were asked for."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    requested: list[str] = []


def app_of(root: Path) -> flask.Flask:
    app = flask.Flask(__name__)

    @app.get("/api/models/<path:name>/<any(revision, tree):what>/<commit>")
    def answer(name: str, what: str, commit: str) -> dict | list:
        if not (root / name).is_dir():
            flask.abort(404)
        files = [{"type": "file", "path": file.name, "size": 1, "oid": file.name} for file in (root / name).iterdir()]
        return files if what == "tree" else {"id": name, "sha": Hub.commit}

    @app.get("/<path:name>/resolve/<revision>/<file>")
    def file_of(name: str, revision: str, file: str) -> flask.Response:
        return flask.send_from_directory(root / name, file)

    @app.after_request
    def finish(response: flask.Response) -> flask.Response:
        if flask.request.method == "GET":
            Hub.requested.append(flask.request.path)
        response.headers["X-Repo-Commit"] = Hub.commit
        if response.status_code == 404:
            response.headers["X-Error-Code"] = "RepoNotFound" if "/none/" in flask.request.path else "EntryNotFound"
        return response

    return app


@contextmanager
def serve_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, which a local server gives out meanwhile; HF_ENDPOINT sets the same two constants."""
    root.mkdir()
    Hub.requested.clear()
    server = make_server("127.0.0.1", 0, app_of(root), threaded=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    yield root
    server.shutdown()
    server.server_close()
