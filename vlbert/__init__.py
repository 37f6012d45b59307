"""VL-BERT (Su et al., ICLR 2020): the model as a library, and the program that trains it.

from vlbert import Batch, Encoded, Example, ImageInput, TextInput, VLBert, Vocabulary, collate
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that editors and type checkers know what __getattr__ gives
    from vlbert.config import ModelConfig
    from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
    from vlbert.data.vocabulary import Vocabulary
    from vlbert.model.vlbert import Encoded, VLBert

__all__ = ["Batch", "Encoded", "Example", "ImageInput", "ModelConfig", "TextInput", "VLBert", "Vocabulary", "collate"]
# Where a name is defined, if not in vlbert.data.batch. Looked up when asked for: vlbert.data.vocabulary needs no torch.
_HOMES = {"VLBert": "vlbert.model.vlbert", "Encoded": "vlbert.model.vlbert"}
_HOMES |= {"ModelConfig": "vlbert.config", "Vocabulary": "vlbert.data.vocabulary"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vlbert")
    if name not in __all__:
        raise AttributeError(f"module vlbert has no {name}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_HOMES.get(name, "vlbert.data.batch")), name)
