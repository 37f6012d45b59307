"""VQA 2.0: a question about a picture, answered with one of 3,129 answers (paper 4.2, figure 2 b).

    torchrun -m vlbert.train finetune_vqa_base data.root=ROOT task.folder=vqa start_from=ROOT/runs/...

The paper (table 2): VL-BERT base 71.16 test-dev; large 71.79 test-dev, 72.22 test-std.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.sample import Sample
from vlbert.batch import Batch, Example, Words
from vlbert.config import ModelConfig
from vlbert.model import Classifier, ClassifierKind, Encoded, VLBert
from vlbert.official import find_samples
from vlbert.official.vqa import UNKNOWN, Question, question_files, read_answers, read_questions
from vlbert.pictures import View, swap_sides
from vlbert.tasks import Questions
from vlbert.text import Vocabulary

if TYPE_CHECKING:
    from vlbert.data import Samples


@dataclass(frozen=True)
class VQASettings:
    folder: str = ""  # holds questions and annotations as the data set ships them, and the answer list
    train_on: tuple[str, ...] = ("train2014",)  # splits, as in the files' names; reported models add val2014
    validate_on: str = "val2014"
    answer_list: str = "answers_vqa.txt"  # text file in folder: the answers to choose from, one a line
    answers: int = 3129  # lines of that file
    loss: Literal["bce", "cross_entropy"] = "bce"  # each answer by itself, to its soft score; or the best one of all
    classifier: ClassifierKind = "words"  # behind [MASK]: with the transform of pre-training's word classifier, ...
    answers_from_words: bool = True  # an answer's weights start as the mean embedding of its word pieces

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold."""
        return self.answer_list, *(file for s in (*self.train_on, self.validate_on) for file in question_files(s))


class VQA:
    shuffles = False
    paper = "71.16 test-dev (base); 71.79 test-dev, 72.22 test-std (large), table 2"

    def __init__(self, settings: VQASettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary

    @functools.cached_property
    def answers(self) -> list[str]:
        """The answer of each class."""
        file = Path(self.settings.folder) / self.settings.answer_list
        answers = read_answers(file)
        if len(answers) != self.settings.answers:
            raise ValueError(
                f"{file} holds {len(answers)} answers, task.answers is {self.settings.answers}; set it to the former, "
                "or name the other list: task.answer_list"
            )
        return answers

    @functools.cached_property
    def class_of(self) -> dict[str, int]:
        """Answer -> its class; of answers that are the same without their punctuation, the first."""
        return {answer: i for i, answer in reversed(list(enumerate(self.answers))) if answer != UNKNOWN}

    def questions(self, samples: "Samples", split: str | None) -> Questions:
        splits = self.settings.train_on if split is None else (split,)
        asks = [ask for split in splits for ask in read_questions(Path(self.settings.folder), split)]
        if not self.class_of.keys() & {answer for ask in asks for answer in ask.answers}:
            raise ValueError(
                f"no question of {', '.join(splits)} has an answer of {self.settings.answer_list}; name the list that "
                f"belongs to {self.settings.folder}: task.answer_list"
            )
        return Questions(find_samples(samples, [ask.image for ask in asks], f"{self.settings.folder}, {splits}"), asks)

    def example(self, sample: Sample, view: View, ask: Question, rng: np.random.Generator) -> Example:
        question, answers = ask.text, ask.answers
        if view.flipped:
            question, answers = swap_sides(question), [swap_sides(answer) for answer in answers]
        words = self.words(self.vocabulary.encode(question), self.scores(answers))
        about = {"question_id": ask.question_id, "question": ask.text}
        return Example(sample.key, words, view.picture(), about)

    def scores(self, answers: Sequence[str]) -> np.ndarray:
        """float32 [answers]: each class's soft score, given what the annotators said."""
        scores = np.zeros(self.settings.answers, np.float32)
        for answer, count in Counter(answers).items():
            if answer in self.class_of:
                scores[self.class_of[answer]] = soft_score(count, len(answers))
        return scores

    def words(self, question: np.ndarray, scores: np.ndarray) -> Words:
        """[CLS] question [SEP] [MASK] [SEP], and the soft score [answers] of each answer, asked for at [MASK]."""
        words = self.vocabulary
        tokens = np.array([words.cls, *question, words.sep, words.mask, words.sep], np.int64)
        here = np.zeros(len(tokens), bool)
        here[len(question) + 2] = True
        segments = np.zeros(len(tokens), np.int64)
        segments[len(question) + 2 :] = 1
        asked = {"scores": scores[None].astype(np.float32)}
        return Words(tokens, segments, np.zeros(len(tokens), np.int64), targets={"answer_here": here}, asked=asked)

    def head(self, config: ModelConfig) -> nn.Module:
        return Classifier(config, self.settings.answers, self.settings.classifier, dropout=config.dropout)

    @torch.no_grad()
    def begin(self, vlbert: VLBert, head: nn.Module, started_from: str | None) -> None:
        """Last preparation of a new run, its weights loaded: every answer's weights become the mean of the embeddings
        of its pieces, its bias 0. An answer without a piece keeps its random ones."""
        if not self.settings.answers_from_words:
            return
        if head.output.in_features != vlbert.config.hidden:
            raise ValueError(
                f"task.classifier={self.settings.classifier} takes {head.output.in_features} channels, words have "
                f"{vlbert.config.hidden}: its answers cannot start from words; set task.answers_from_words=false"
            )
        embedding = vlbert.embedding.words.weight
        for row, answer in enumerate(self.answers):
            pieces = self.vocabulary.encode(answer)
            if len(pieces):
                head.output.weight[row] = embedding[torch.from_numpy(pieces).to(embedding.device)].mean(dim=0)
        head.output.bias.zero_()

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """[N, answers], read at the [MASK] that stands for the answer."""
        return head(encoded.text[batch.targets["answer_here"]]).float()

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits, scores = self.logits(head, encoded, batch), batch.asked["scores"]
        if self.settings.loss == "bce":
            return {"answers": (F.binary_cross_entropy_with_logits(logits, scores, reduction="sum"), len(logits))}
        known = scores.amax(dim=1) > 0  # the others have no answer among ours
        return {"answers": (F.cross_entropy(logits[known], scores[known].argmax(1), reduction="sum"), int(known.sum()))}

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        chosen, scores = self.logits(head, encoded, batch).argmax(1), batch.asked["scores"]
        columns = {
            "key": batch.keys,
            "answer": [self.answers[i] for i in chosen.tolist()],
            "score": scores.gather(1, chosen[:, None])[:, 0].tolist(),
            "reachable": scores.amax(1).tolist(),  # what the best of our answers would have scored
        }
        found = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [about | row for about, row in zip(batch.about, found, strict=True)]

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        """accuracy: mean soft score of the answers given; reachable: of the best answers that the list holds."""
        return {
            "accuracy": float(np.mean([row["score"] for row in rows])),
            "reachable": float(np.mean([row["reachable"] for row in rows])),
        }


def soft_score(count: int, annotators: int) -> float:
    """What an answer that `count` of the annotators gave is worth: min(1, n / 3), n of the others giving it, averaged
    over leaving each annotator out. Of ten: 0, 0.3, 0.6, 0.9, then 1."""
    given, not_given = min(1.0, (count - 1) / 3), min(1.0, count / 3)
    return (count * given + (annotators - count) * not_given) / annotators
