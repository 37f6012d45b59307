"""VQA 2.0: a question about a picture, answered with one of 3,129 answers (paper 4.2, figure 2 b).

    torchrun -m vlbert.train finetune_vqa_base data.root=ROOT task.folder=vqa init_from=ROOT/runs/...

The paper (table 2): VL-BERT base 71.16 test-dev; large 71.79 test-dev, 72.22 test-std.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from storage.reading import Samples
from storage.sample import Sample
from vlbert.config import ModelConfig
from vlbert.data.batch import Batch, Example, TextInput
from vlbert.data.images import PreparedImage, swap_sides
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets import vqa
from vlbert.datasets.vqa import Question
from vlbert.model.heads import Classifier, ClassifierKind
from vlbert.model.vlbert import Encoded, VLBert
from vlbert.tasks.base import Questions, accuracy, flaw_in, questions_of

RANKED = 5  # answers that a prediction names
OTHERS = 6  # positions that are not the question's: of [CLS], two [SEP], [MASK], the regions and [END]


@dataclass(frozen=True)
class VQASettings:
    folder: str = ""  # holds questions and annotations as the data set ships them, and the answer list
    train_on: tuple[str, ...] = ("train2014",)  # splits, as in the files' names; reported models add val2014
    validate_on: str = "val2014"  # split of validation, as in the files' names
    answer_list: str = "answers_vqa.txt"  # file in folder: the answers to choose from, one a line, or a JSON list
    answers: int = 3129  # how many those are
    # Word pieces that BERT's 512 positions leave. Longer questions are not learned from, and held out lose their end.
    question_length: int = 512 - OTHERS
    loss: Literal["bce", "cross_entropy"] = "bce"  # each answer by itself, to its soft score; or the best one of all
    classifier: ClassifierKind = "words"  # behind [MASK]: with the transform of pre-training's word classifier, ...
    answers_from_words: bool = True  # an answer's weights start as the mean embedding of its word pieces

    @property
    def files(self) -> tuple[str, ...]:
        """What `folder` must hold."""
        return self.answer_list, *(file for s in (*self.train_on, self.validate_on) for file in vqa.question_files(s))

    def __post_init__(self):
        for name in ("answers", "question_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


class VQA:
    shuffles = False
    kept = ("answers",)
    paper = f"table 2: {'; '.join(f'{split} {found}' for split, found in vqa.REPORTED.items())}; none on val2014"

    @staticmethod
    def best(settings: VQASettings) -> str:
        return "accuracy"

    def __init__(self, settings: VQASettings, vocabulary: Vocabulary, num_classes: int):
        self.settings = settings
        self.vocabulary = vocabulary
        self.folder = Path(settings.folder)

    @functools.cached_property
    def answers(self) -> list[str]:
        """The answer of each class."""
        return vqa.read_answers(self.folder / self.settings.answer_list, self.settings.answers)

    @functools.cached_property
    def class_of(self) -> dict[str, int]:
        """Answer -> its class; of answers that are the same without their punctuation, the first."""
        return {answer: i for i, answer in reversed(list(enumerate(self.answers))) if answer != vqa.UNKNOWN}

    def questions(self, samples: Samples, split: str | None) -> Questions:
        splits = self.settings.train_on if split is None else (split,)
        asks = [ask for split in splits for ask in vqa.read_questions(self.folder, split)]
        if split is None and not all(ask.answers for ask in asks):
            raise ValueError(f"task.train_on={','.join(splits)}: a test split has no answers to learn from")
        said = {answer for ask in asks for answer in ask.answers}
        if said and not self.class_of.keys() & said:
            raise ValueError(
                f"no question of {', '.join(splits)} has an answer of {self.settings.answer_list}; name the list that "
                f"belongs to {self.settings.folder}: task.answer_list"
            )
        found = [(a, f"question {a.question_id} of {a.split}", a.image, self._flaw(a.text)) for a in asks]
        return questions_of(samples, found, split is None, f"{', '.join(splits)} of {self.folder}")

    def _flaw(self, text: str) -> str:
        return flaw_in(text, "question_length", self.settings.question_length, self.vocabulary)

    def ask(self, text: str, choices: Sequence[str] = (), answer: str = "", hide: Sequence[int] = ()) -> Question:
        """A person's own question; `answer`, where it is given, is the right one. Its answers are those of the list."""
        if choices or hide:
            raise ValueError("VQA answers from its own list and hides nothing: give no choices and no regions to hide")
        if flaw := self._flaw(text):
            raise ValueError(f"the question {text[:60]!r} cannot be asked: {flaw}")
        return Question(0, "", text, "", (answer,) * bool(answer), answer or None)

    def example(self, sample: Sample, image: PreparedImage, ask: Question, rng: np.random.Generator) -> Example:
        question, answers = ask.text, ask.answers
        if image.flipped:
            question, answers = swap_sides(question), [swap_sides(answer) for answer in answers]
        tokens = self.vocabulary.encode(question)[: self.settings.question_length]
        return Example(sample.key, self.words(tokens, self.scores(answers)), image.to_input(), ask.columns())

    def scores(self, answers: Sequence[str]) -> np.ndarray:
        """float32 [answers]: each class's soft score, given what the annotators said."""
        scores = np.zeros(self.settings.answers, np.float32)
        for answer, count in Counter(answers).items():
            if answer in self.class_of:
                scores[self.class_of[answer]] = vqa.soft_score(count, len(answers))
        return scores

    def words(self, question: np.ndarray, scores: np.ndarray) -> TextInput:
        """[CLS] question [SEP] [MASK] [SEP], and the soft score [answers] of each answer, asked for at [MASK]."""
        words = self.vocabulary
        tokens = np.array([words.cls, *question, words.sep, words.mask, words.sep], np.int64)
        here = np.zeros(len(tokens), bool)
        here[len(question) + 2] = True
        segments = np.zeros(len(tokens), np.int64)
        segments[len(question) + 2 :] = 1
        asked = {"scores": scores[None].astype(np.float32)}
        return TextInput(
            tokens, segments, np.zeros(len(tokens), np.int64), label_masks={"answer_here": here}, labels=asked
        )

    def head(self, config: ModelConfig) -> nn.Module:
        room = config.max_positions - OTHERS
        if self.settings.question_length > room:
            raise ValueError(
                f"task.question_length is {self.settings.question_length}, the model has room for {room}: set that"
            )
        return Classifier(config, self.settings.answers, self.settings.classifier, dropout=config.dropout)

    @torch.no_grad()
    def begin(self, vlbert: VLBert, head: nn.Module, started_from: str | None) -> None:
        """Last preparation of a new run, its weights loaded: every answer's weights become the mean of the embeddings
        of its pieces, its bias 0. An answer without a piece keeps its random ones."""
        if not self.settings.answers_from_words:
            return
        if head.output.in_features != vlbert.config.hidden_size:
            raise ValueError(
                f"task.classifier={self.settings.classifier} takes {head.output.in_features} channels, words have "
                f"{vlbert.config.hidden_size}: its answers cannot start from words; set task.answers_from_words=false"
            )
        embedding = vlbert.embedding.words.weight
        for row, answer in enumerate(self.answers):
            pieces = self.vocabulary.encode(answer)
            if len(pieces):
                head.output.weight[row] = embedding[torch.from_numpy(pieces).to(embedding.device)].mean(dim=0)
        head.output.bias.zero_()

    def logits(self, head: nn.Module, encoded: Encoded, batch: Batch) -> Tensor:
        """[N, answers], read at the [MASK] that stands for the answer."""
        return head(encoded.text[batch.label_masks["answer_here"]]).float()

    def losses(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        logits, scores = self.logits(head, encoded, batch), batch.labels["scores"]
        monitored = {"accuracy": accuracy(scores.gather(1, logits.argmax(1, keepdim=True))[:, 0])}
        if self.settings.loss == "bce":
            loss = F.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
        else:
            logits, scores = (x[scores.amax(dim=1) > 0] for x in (logits, scores))  # others: no answer among ours
            loss = F.cross_entropy(logits, scores.argmax(1), reduction="sum")
        return {"answers": (loss, len(logits))} | monitored

    def predictions(self, vlbert: VLBert, head: nn.Module, encoded: Encoded, batch: Batch) -> list[dict]:
        """Beside the columns of all tasks: score is the official accuracy, soft_score what training gives the answer,
        reachable what the best answer of the list would have got of that."""
        logits, scores = self.logits(head, encoded, batch), batch.labels["scores"]
        sure = logits.sigmoid() if self.settings.loss == "bce" else logits.softmax(1)
        likeliest = logits.topk(min(RANKED, logits.shape[1]))
        columns = zip(
            batch.keys,
            batch.metadata,
            likeliest.indices.tolist(),
            sure.gather(1, likeliest.indices).tolist(),
            scores.gather(1, likeliest.indices)[:, 0].tolist(),
            scores.amax(1).tolist(),
            strict=True,
        )
        rows = []
        for key, about, classes, shares, soft, best in columns:
            ranking = [{"said": self.answers[i], "probability": p} for i, p in zip(classes, shares, strict=True)]
            worth = vqa.judge(ranking[0]["said"], about["answers"], soft, best)
            rows.append({"key": key, **about, **ranking[0], "ranking": ranking, "boxes": [], **worth})
        return rows

    def metrics(self, rows: Sequence[dict]) -> dict[str, float]:
        return vqa.means(rows)

    def submission(self, rows: Sequence[dict]) -> dict[str, bytes]:
        return vqa.submission(self.folder, rows)

    def reported(self, split: str) -> dict[str, str]:
        return {"accuracy": vqa.REPORTED[split]} if split in vqa.REPORTED else {}
