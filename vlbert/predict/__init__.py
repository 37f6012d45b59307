"""A trained model on images of your own: `vlbert predict`, its page, and `Predictor` for code."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlbert.predict.command import Predictor

__all__ = ["Predictor"]


def __getattr__(name: str) -> Any:
    if name != "Predictor":
        raise AttributeError(f"module vlbert.predict has no {name}")
    from vlbert.predict.command import Predictor  # here, because it brings torch

    return Predictor
