"""VL-BERT (Su et al., ICLR 2020): the model as a library, and the programs that train and evaluate it.

from vlbert import Batch, Encoded, Example, ImageInput, TextInput, VLBert, Vocabulary, collate
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # editors and type checkers do not run __getattr__
    from vlbert.config import ModelConfig
    from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
    from vlbert.data.vocabulary import Vocabulary
    from vlbert.model.vlbert import Encoded, VLBert

__all__ = ["Batch", "Encoded", "Example", "ImageInput", "ModelConfig", "TextInput", "VLBert", "Vocabulary", "collate"]
# Modules of the names outside vlbert.data.batch. Imported on first use, because the vocabulary needs no torch.
_MODULES = {"VLBert": "vlbert.model.vlbert", "Encoded": "vlbert.model.vlbert"}
_MODULES |= {"ModelConfig": "vlbert.config", "Vocabulary": "vlbert.data.vocabulary"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vlbert")
    if name not in __all__:
        raise AttributeError(f"module vlbert has no attribute {name}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_MODULES.get(name, "vlbert.data.batch")), name)
