"""Find the files of a model by its name: a local folder, a run, or a model on the Hugging Face Hub."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from vlbert.checkpoint import CONFIG, MODEL, find_checkpoint

PROCESSOR, README = "processor_config.json", "README.md"
MADE_BY = "<!-- made by vlbert.hf: a card with this line is replaced, any other is kept -->"
HUB = {"revision", "cache_dir", "force_download", "local_files_only", "token"}  # options of `snapshot_download`


class ModelNotReadable(OSError, ValueError):
    """Raised for a missing or damaged model. An OSError, as in transformers, and a ValueError, as in this package."""


def fetch_folder(name: str | os.PathLike, files: Sequence[str], **hub: Any) -> str:
    """Return a model's local folder. If the model is on the Hub, download its `files` first, all from the same commit.

    The folder of a run, ROOT/runs/RUN, stands for its newest checkpoint. `hub` has keyword arguments for
    `snapshot_download`. Raises TypeError if it has a name that is not in HUB, and ModelNotReadable if there is no such
    model.
    """
    if unknown := hub.keys() - HUB:
        raise TypeError(f"from_pretrained takes no {', '.join(sorted(unknown))}")
    path = Path(name).expanduser()
    is_run = path.absolute().parent.name == "runs" and not (path / MODEL).is_file()
    if not is_run and ((path / CONFIG).is_file() or (path / PROCESSOR).is_file()):
        return str(path)
    if path.is_dir() or (path.name == "best" and path.parent.is_dir()):
        try:
            store, folder = find_checkpoint(str(path.absolute()))
        except ValueError as error:
            raise ModelNotReadable(str(error)) from error
        return store.uri(folder).rstrip("/")
    try:
        downloaded = snapshot_download(str(name), allow_patterns=list(files), **hub)
        reason = f"it has no {CONFIG}"
    except (HFValidationError, OSError) as error:
        downloaded, reason = "", str(error).strip().split("\n")[0]
    if not downloaded or not Path(downloaded, CONFIG).is_file():
        raise ModelNotReadable(
            f"{name} is neither a folder nor a model on the Hub ({reason}); there is no folder {path.absolute()}; name "
            "the folder of a model, of a run (ROOT/runs/RUN) or of a checkpoint (ROOT/runs/RUN/step-*), or a model on "
            "the Hub (OWNER/NAME)"
        )
    return downloaded
