"""Run a trained model on your own images: `vlbert predict`, its web page, and the classes `Predictor` and `Ranker`."""

from vlbert.predict.predictor import Predictor
from vlbert.predict.ranking import Ranker

__all__ = ["Predictor", "Ranker"]
