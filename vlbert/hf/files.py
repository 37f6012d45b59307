"""Where the files of a name are: a folder of this machine, a run, or the Hugging Face hub."""

import os
from pathlib import Path
from typing import Any

from vlbert.checkpoint import CONFIG, DETECTOR, TASK, VOCABULARY, find_checkpoint
from vlbert.hub import download_model

PROCESSOR = "processor_config.json"
HUB = {"revision", "cache_dir", "force_download", "local_files_only", "token"}  # options of hf_hub_download
# What Auto classes and transformers' own loader take, and what has no meaning here.
IGNORED = {"adapter_kwargs", "code_revision", "low_cpu_mem_usage", "trust_remote_code", "use_fast", "use_safetensors"}
IGNORED |= {"weights_only"}


def find_folder(name: str | os.PathLike) -> str:
    """The path of a model's folder; for ROOT/runs/RUN that of its newest checkpoint, for ROOT/runs/RUN/best of its
    best. A name of the hub stays as it is. OSError where a local folder is missing or holds no model."""
    path = Path(name).expanduser()
    if (path / CONFIG).is_file() or (path / PROCESSOR).is_file():
        return str(path)
    if not (path.is_dir() or _is_local(str(name))):
        return str(name)
    if not (path.is_dir() or (path.name == "best" and path.parent.is_dir())):
        raise OSError(
            f"there is no folder {path.absolute()}; name the folder of a model, of a run (ROOT/runs/RUN) or of a "
            "checkpoint (ROOT/runs/RUN/step-*), or a model on the hub (OWNER/NAME)"
        )
    try:
        store, folder = find_checkpoint(str(path.absolute()))
    except ValueError as error:
        raise OSError(str(error)) from error
    return store.where(folder).rstrip("/")


def _is_local(name: str) -> bool:
    """Whether a name can be none of the hub, OWNER/NAME, or begins with a folder that is here."""
    owner, _, rest = name.partition("/")
    return name.startswith(("/", ".", "~")) or "/" in rest or "://" in name or (bool(rest) and Path(owner).is_dir())


def fetch_folder(name: str | os.PathLike, **hub: Any) -> str:
    """find_folder, or the folder into which a model of the hub was downloaded; OSError where there is none.

    hub: options of `hf_hub_download`.
    """
    folder = find_folder(name)
    if Path(folder).is_dir():
        return folder
    try:
        return str(download_model(folder, (VOCABULARY, TASK, PROCESSOR, DETECTOR), **hub))
    except ValueError as error:
        raise OSError(f"{error}; there is no folder {Path(folder).absolute()} either") from error
