"""Finds the files of a model by its name: a folder of this machine, a run, or the Hugging Face hub."""

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
    """A model is missing or damaged. OSError is what transformers raises, ValueError what this package does."""


def fetch_folder(name: str | os.PathLike, files: Sequence[str], **hub: Any) -> str:
    """find_folder, or the folder into which those `files` that a model of the hub has were downloaded, of one commit.

    hub: options of `snapshot_download`, those in HUB; TypeError names others.
    """
    if unknown := hub.keys() - HUB:
        raise TypeError(f"from_pretrained takes no {', '.join(sorted(unknown))}")
    folder = find_folder(name)
    if Path(folder).is_dir():
        return folder
    try:
        found = snapshot_download(folder, allow_patterns=list(files), **hub)
        reason = f"it has no {CONFIG}"
    except (HFValidationError, OSError) as error:
        found, reason = "", str(error).strip().split("\n")[0]
    if not found or not Path(found, CONFIG).is_file():
        here = Path(folder).absolute()
        raise ModelNotReadable(
            f"{name} is neither a folder nor a model on the hub ({reason}); there is no folder {here}"
        )
    return found


def find_folder(name: str | os.PathLike) -> str:
    """Return the path of a model's folder; for ROOT/runs/RUN that of its newest checkpoint, for ROOT/runs/RUN/best of
    its best. A name of the hub stays as it is. ModelNotReadable where a local folder is missing or holds no model."""
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
    """Whether a name can be none of the hub, OWNER/NAME, or begins with a folder that is here."""
    owner, _, rest = name.partition("/")
    return name.startswith(("/", ".", "~")) or "/" in rest or "://" in name or (bool(rest) and Path(owner).is_dir())
