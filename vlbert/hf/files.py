"""Find the files of a model by its name: a local folder, a run, or a model on the Hugging Face hub."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from vlbert.checkpoint import CONFIG, find_checkpoint

PROCESSOR = "processor_config.json"
HUB = {"revision", "cache_dir", "force_download", "local_files_only", "token"}  # options of `snapshot_download`


class ModelNotReadable(OSError, ValueError):
    """The error of a missing or damaged model: an OSError, as in transformers, and a ValueError, as in this package."""


def fetch_folder(name: str | os.PathLike, files: Sequence[str], **hub: Any) -> str:
    """Return a model's local folder. For a model on the hub, `files` are downloaded first, all from the same commit.

    `hub`: options of `snapshot_download`. Raises TypeError if one is not in HUB, ModelNotReadable if no model is found.
    """
    if unknown := hub.keys() - HUB:
        raise TypeError(f"from_pretrained takes no {', '.join(sorted(unknown))}")
    folder = find_folder(name)
    if Path(folder).is_dir():
        return folder
    try:
        downloaded = snapshot_download(folder, allow_patterns=list(files), **hub)
        reason = f"it has no {CONFIG}"
    except (HFValidationError, OSError) as error:
        downloaded, reason = "", str(error).strip().split("\n")[0]
    if not downloaded or not Path(downloaded, CONFIG).is_file():
        local = Path(folder).absolute()
        raise ModelNotReadable(
            f"{name} is neither a folder nor a model on the hub ({reason}); there is no folder {local}"
        )
    return downloaded


def find_folder(name: str | os.PathLike) -> str:
    """Return the path of a model's folder; for ROOT/runs/RUN, of its newest checkpoint. A hub name is returned as is.

    Raises ModelNotReadable if a local folder is missing or holds no model.
    """
    path = Path(name).expanduser()
    if (path / CONFIG).is_file() or (path / PROCESSOR).is_file():
        return str(path)
    if not (path.is_dir() or _is_local(str(name))):
        return str(name)
    if not (path.is_dir() or (path.name == "best" and path.parent.is_dir())):
        raise ModelNotReadable(
            f"there is no folder {path.absolute()}; name the folder of a model, of a run (ROOT/runs/RUN) or of a "
            "checkpoint (ROOT/runs/RUN/step-*), or a model on the hub (OWNER/NAME)"
        )
    try:
        store, folder = find_checkpoint(str(path.absolute()))
    except ValueError as error:
        raise ModelNotReadable(str(error)) from error
    return store.uri(folder).rstrip("/")


def _is_local(name: str) -> bool:
    """Return True if a name is not of the form OWNER/NAME, as on the hub, or if OWNER is an existing local folder."""
    owner, _, rest = name.partition("/")
    return name.startswith(("/", ".", "~")) or "/" in rest or "://" in name or (bool(rest) and Path(owner).is_dir())
