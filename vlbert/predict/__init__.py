"""A trained model on images of your own: `vlbert predict`, its page, and `Predictor` and `Ranker` for code."""

from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker

__all__ = ["Predictor", "Ranker"]
