"""Models of the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from vlbert.checkpoint import CONFIG, MODEL, VOCABULARY


def download_model(name: str, beside: Sequence[str] = (VOCABULARY,), **options: Any) -> Path:
    """Download a model of the hub and return its folder. Raises ValueError if there is none of that name.

    beside: files that a model may have or not.
    """
    try:
        folder = Path(hf_hub_download(name, CONFIG, **options)).parent
        options["revision"] = folder.name  # the same commit for all files, whatever is pushed meanwhile
        for file in beside:
            try:
                hf_hub_download(name, file, **options)
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError) and not options["local_files_only"]:
                    raise  # the hub was out of reach
        hf_hub_download(name, MODEL, **options)
    except (HFValidationError, EntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{name} is neither a folder nor a model on the hub ({reason})") from error
    return folder
