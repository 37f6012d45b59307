"""A trained model on images of your own: `vlbert predict`, its page, and `Predictor` and `Ranker` for code."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlbert.predict.predictor import Predictor
    from vlbert.predict.ranking import Ranker

__all__ = ["Predictor", "Ranker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module vlbert.predict has no {name}")
    from vlbert.predict import predictor, ranking  # here, because they bring torch

    return {"Predictor": predictor.Predictor, "Ranker": ranking.Ranker}[name]
