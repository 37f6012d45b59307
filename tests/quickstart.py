"""notebooks/quickstart.ipynb, made from docs/library.md: `PYTHONPATH=. python tests/quickstart.py` writes it."""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from places import PROJECT
from tiny import TINY_MODEL

from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.hf import VLBertConfig, VLBertModel

NOTEBOOK = PROJECT / "notebooks" / "quickstart.ipynb"
_FIRST = """\
This notebook is made from `docs/library.md`: `PYTHONPATH=. python tests/quickstart.py` writes it anew.
Its cells need a model folder `vl-bert-base-e2e` and an image `dog.jpg` beside it; the first section says how a released
checkpoint becomes such a folder. The outputs are those of a tiny model with random weights, on noise."""


def cells() -> list[tuple[str, str]]:
    """(kind, source) of each cell: Python's blocks of the page are code, all else is text."""
    page = (PROJECT / "docs" / "library.md").read_text()
    parts = re.split(r"```python\n(.*?)```\n", re.sub(r"\]\(([\w-]+\.md)", r"](../docs/\1", page), flags=re.DOTALL)
    kinds = [("markdown", part) if number % 2 == 0 else ("code", part) for number, part in enumerate(parts)]
    return [("markdown", _FIRST), *((kind, part.strip("\n")) for kind, part in kinds if part.strip())]


def make_files(folder: Path) -> None:
    """What the cells read: a model with random weights, and an image."""
    torch.manual_seed(0)
    words = Vocabulary([*SPECIALS, "a", "dog", "on", "sofa", "text", "alone"])
    VLBertModel(VLBertConfig(TINY_MODEL, len(words))).save_pretrained(folder / "vl-bert-base-e2e")
    (folder / "vl-bert-base-e2e/vocab.txt").write_text(words.text())
    torch.manual_seed(0)
    noise = torch.randint(0, 256, (150, 200, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(folder / "dog.jpg", quality=95)


def executed(folder: Path) -> dict[str, Any]:
    """The notebook, its cells executed in order in a folder with these files."""
    found, names, count = [], {}, 0
    with contextlib.chdir(folder):
        for number, (kind, source) in enumerate(cells()):
            cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(True)}
            if kind == "code":
                count += 1
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(source, f"cell {number}", "exec"), names)
                text = printed.getvalue().splitlines(True)
                outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
                cell |= {"execution_count": count, "outputs": outputs}
            found.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def as_text(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        make_files(Path(made))
        NOTEBOOK.parent.mkdir(exist_ok=True)
        NOTEBOOK.write_text(as_text(executed(Path(made))))
