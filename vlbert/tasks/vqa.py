"""VQA 2.0: answer a question about an image with one of 3,129 answers (paper 4.2, figure 2 b).

    torchrun -m vlbert.train finetune_vqa --data.root ROOT --task.folder vqa --init_from ROOT/runs/...

The paper (table 2) reports an accuracy of 71.16 % on test-dev for VL-BERT base. For VL-BERT large, it reports 71.79 %
on test-dev and 72.22 % on test-std.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from storage.settings import check
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput, select
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.datasets import vqa
from vlbert.datasets.vqa import Question
from vlbert.model.heads import Classifier, ClassifierKind, PairClassifier
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Examples, Task, TaskSettings, accuracy, invalid_reason, make_examples

MAX_RANKED = 5  # answers in a prediction's ranking
OTHER_TOKENS = 6  # positions besides the question: [CLS], two [SEP], [MASK], the regions and [END]


@dataclass(frozen=True)
class VQASettings(TaskSettings):
    folder: str = ""  # folder with questions and annotations as the data set ships them, and the answer list
    train_on: tuple[str, ...] = ("train2014",)  # splits to train on, as in file names; reported models add val2014
    validate_on: str = "val2014"  # split to validate on, as in file names
    answer_list: str = "answers_vqa.txt"  # file in folder with the answers to choose from, one per line
    answers: int = 3129  # number of answers in answer_list
    # maximum tokens, limited by BERT's 512 positions; training skips longer questions, evaluation cuts them
    question_length: int = 512 - OTHER_TOKENS
    loss: Literal["bce", "cross_entropy"] = "bce"  # bce: soft scores of all answers; cross_entropy: the best answer
    # vector to classify; mask: at a [MASK] after the question; pair: the row's pooled vector (ModelConfig.pooler)
    reads: Literal["mask", "pair"] = "mask"
    classifier: ClassifierKind = "words"  # classifier of answers; words: with pre-training's word transform
    classifier_dropout: float | None = None  # dropout probability in the classifier; None: the model's
    answers_from_words: bool = True  # initialise each answer's weights with the mean embedding of its tokens
    validate_shuffled: bool = False  # validate a second time, with each question next to another one's image

    @property
    def files(self) -> tuple[str, ...]:
        return self.answer_list, *(file for s in (*self.train_on, self.validate_on) for file in vqa.question_files(s))

    def lengths(self, text_rows: bool = False) -> dict[str, int]:
        return {"question_length": OTHER_TOKENS}

    def __post_init__(self):
        for name in ("answers", "question_length"):
            check(self, getattr(self, name) >= 1, name, "at least 1")
        dropout = self.classifier_dropout
        check(self, dropout is None or 0 <= dropout < 1, "classifier_dropout", "in [0, 1), or none")
        read_by_words = self.reads == "pair" and self.answers_from_words
        check(self, not read_by_words, "answers_from_words", "false if reads is pair")


class VQA(Task):
    saved = ("answers",)

    @staticmethod
    def best_metric(settings: VQASettings) -> str:
        return "accuracy"

    @functools.cached_property
    def answers(self) -> list[str]:
        """The answers, in the order of the classifier's classes."""
        return vqa.read_answers(self.folder / self.settings.answer_list, self.settings.answers)

    @functools.cached_property
    def class_of(self) -> dict[str, int]:
        """A dict from answer to class, without UNKNOWN. If an answer is listed twice, its first class counts."""
        return {answer: i for i, answer in reversed(list(enumerate(self.answers))) if answer != vqa.UNKNOWN}

    def examples(self, samples: Samples, split: str | None) -> Examples:
        splits = self.settings.splits(split)
        questions = [question for split in splits for question in vqa.read_questions(self.folder, split)]
        if split is None and not all(question.answers for question in questions):
            raise ValueError(f"--task.train_on={','.join(splits)} has a test split, which has no answers to learn from")
        annotators_answers = {answer for question in questions for answer in question.answers}
        if annotators_answers and not self.class_of.keys() & annotators_answers:
            raise ValueError(
                f"no question of {', '.join(splits)} has an answer of {self.settings.answer_list}; name the list that "
                f"belongs to {self.settings.folder} in task.answer_list"
            )
        rows = [(q, f"question {q.question_id} of {q.split}", q.image, self._invalid_reason(q.text)) for q in questions]
        return make_examples(self.settings, samples, split, rows)

    def _invalid_reason(self, text: str) -> str:
        return invalid_reason(text, "question_length", self.settings.question_length, self.vocabulary)

    def annotation_for(self, text: str, answer: str = "") -> Question:
        """Make a Question from a user's text. `answer` is the right answer, or "" if it is unknown."""
        if reason := self._invalid_reason(text):
            raise ValueError(f"the question {text[:60]!r} is invalid: {reason}")
        return Question(0, "", text, "", (answer,) * bool(answer), answer or None)

    def example(self, sample: Sample, image: PreparedImage, annotation: Question, rng: np.random.Generator) -> Example:
        question, answers = annotation.text, annotation.answers
        if image.flipped:
            question, answers = swap_sides(question), [swap_sides(answer) for answer in answers]
        tokens = self.vocabulary.encode(question)[: self.settings.question_length]
        text_input = self.text_input(tokens, self.scores(answers))
        return Example(sample.key, text_input, image.to_input(), annotation.columns())

    def text_input(self, question: np.ndarray, scores: np.ndarray) -> TextInput:
        """Return the input [CLS] question [SEP] [MASK] [SEP], or [CLS] question [SEP] if the setting `reads` is "pair".

        The token [MASK], or [CLS] for "pair", gets two labels: the soft scores of all answers, and the class with the
        highest score. If all scores are 0, there is no class.
        """
        words = self.vocabulary
        tokens = [words.cls, *question, words.sep]
        if self.settings.reads == "mask":
            tokens += [words.mask, words.sep]
        position, mask = np.arange(len(tokens)), len(question) + 2
        return TextInput(
            np.array(tokens, np.int64),
            segments=(position >= mask).astype(np.int64),
            token_region=np.zeros(len(tokens), np.int64),
            label_masks={"answer": position == (mask if self.settings.reads == "mask" else 0)},
            labels={
                "scores": scores[None].astype(np.float32),
                "class": np.array([scores.argmax()] if scores.any() else [], np.int64),
            },
        )

    def scores(self, answers: Sequence[str]) -> np.ndarray:
        """Return the soft score of each class, float32 [answers], given the annotators' answers to a question."""
        scores = np.zeros(self.settings.answers, np.float32)
        for answer, count in Counter(answers).items():
            if answer in self.class_of:
                scores[self.class_of[answer]] = vqa.soft_score(count, len(answers))
        return scores

    def head(self, config: ModelConfig) -> nn.Module:
        self.settings.fit(config)  # a model without a recipe has not been checked
        kind = Classifier if self.settings.reads == "mask" else PairClassifier
        given = self.settings.classifier_dropout
        return kind(config, self.settings.answers, self.settings.classifier, config.dropout if given is None else given)

    def pretrained_parts(self, head: nn.Module) -> Mapping[str, str]:
        return {"pooler": "pooler"} if isinstance(head, PairClassifier) else super().pretrained_parts(head)

    @torch.no_grad()
    def on_start(self, vlbert: VLBert, head: Classifier, init_from: str | None) -> None:
        """If `answers_from_words` is set, initialise the classifier from the word embeddings.

        Each answer's weights become the mean embedding of its tokens, and all biases become 0.
        """
        if not self.settings.answers_from_words:
            return
        output = head.output
        if not isinstance(output, nn.Linear) or output.in_features != vlbert.config.hidden_size:
            raise ValueError(
                f"--task.classifier={self.settings.classifier} has no weights as wide as words, which have "
                f"{vlbert.config.hidden_size} channels; set --task.no_answers_from_words"
            )
        embedding = vlbert.embedding.words.weight
        for row, answer in enumerate(self.answers):
            tokens = self.vocabulary.encode(answer)
            if len(tokens):
                output.weight[row] = embedding[torch.from_numpy(tokens).to(embedding.device)].mean(dim=0)
        output.bias.zero_()

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """Return the logits of all answers to each question, float32 [questions, answers]."""
        answers = batch.labelled["answer"]
        if self.settings.reads == "pair":
            return head(encoded.text, encoded.regions).index_select(0, answers // batch.tokens.shape[1]).float()
        return head(select(encoded.text, answers)).float()

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits, scores = self.logits(head, encoded, batch), batch.labels["scores"]
        monitored = {"accuracy": accuracy(scores.gather(1, logits.argmax(1, keepdim=True))[:, 0])}
        if self.settings.loss == "bce":
            loss = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
        else:
            classes = batch.labels["class"]
            answered = (scores.amax(dim=1) > 0).nonzero_static(size=len(classes))[:, 0]  # with an answer in the list
            logits = logits.index_select(0, answered)
            loss = F.cross_entropy(logits, classes, reduction="sum")
        return {"answers": (loss, len(logits))} | monitored

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Return one dict per question, including Question.columns. The column `score` is the official accuracy."""
        logits = self.logits(head, encoded, batch)
        probabilities = logits.sigmoid() if self.settings.loss == "bce" else logits.softmax(1)
        top = logits.topk(min(MAX_RANKED, logits.shape[1])).indices  # (N, ranked)
        likely, rows = probabilities.gather(1, top).tolist(), []
        for key, metadata, classes, each in zip(batch.keys, batch.metadata, top.tolist(), likely, strict=True):
            ranking = [{"answer": self.answers[i], "probability": p} for i, p in zip(classes, each, strict=True)]
            annotators = metadata["annotator_answers"]
            score = vqa.accuracy(ranking[0]["answer"], annotators) if annotators else None
            rows.append({"key": key, **metadata, **ranking[0], "ranking": ranking, "boxes": [], "score": score})
        return rows

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return vqa.metrics(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        return vqa.submission(self.folder, rows)
