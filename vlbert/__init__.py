"""VL-BERT (Su et al., ICLR 2020): the model as a library, and the program that trains it.

from vlbert import Batch, Encoded, Example, ImageInput, TextInput, VLBert, Vocabulary, collate
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that editors and type checkers know what __getattr__ gives
    from vlbert.config import ModelConfig
    from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
    from vlbert.data.vocabulary import Vocabulary
    from vlbert.model.vlbert import Encoded, VLBert

# Where each name is defined. Looked up when asked for: vlbert.data.vocabulary, say, needs no torch.
_HOMES = {
    "VLBert": "vlbert.model.vlbert",
    "Encoded": "vlbert.model.vlbert",
    "ModelConfig": "vlbert.config",
    "Vocabulary": "vlbert.data.vocabulary",
} | dict.fromkeys(("Batch", "Example", "ImageInput", "TextInput", "collate"), "vlbert.data.batch")

__all__ = [
    "Batch",
    "Encoded",
    "Example",
    "ImageInput",
    "ModelConfig",
    "TextInput",
    "VLBert",
    "Vocabulary",
    "collate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vlbert")
    if name not in _HOMES:
        raise AttributeError(f"module vlbert has no {name}; it has {', '.join(_HOMES)}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
