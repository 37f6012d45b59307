"""It learns, and from the image: what is memorised, what masking takes away, and what leaks past a mask.

docs/results.md explains the numbers; `pytest -m slow -s tests/vlbert/test_it_learns.py` prints them.

A drawn image shows a ball of a warm colour on the left and one of a cold colour on the right, the caption names both:
text alone knows a colour from three, images know it. Each ball has two regions, one tight, one with room around it,
as detectors give several boxes for one object.
"""

import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tiny import DETECTOR, TINY_MODEL

from storage.sample import Regions, Sample, sample_key
from training.distributed import ALONE
from training.optimizer import OptimizerConfig, make_optimizer, set_learning_rate
from vlbert.config import DataConfig, Recipe, RegionConfig
from vlbert.data.batch import Batch, Example, ImageInput, TextInput, collate
from vlbert.data.loading import TrainingData, TrainingDataset
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.model.vlbert import VLBert
from vlbert.tasks.base import TaskModel
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.validate import validate

SEEDS = (0, 1, 2)
STEPS = 80
DATA = DataConfig(batch=32, workers=0)
WARM = {"red": (220, 30, 30), "yellow": (230, 200, 30), "pink": (240, 130, 180)}
COLD = {"green": (30, 160, 60), "blue": (40, 60, 220), "cyan": (60, 210, 220)}
COLOURS = WARM | COLD
WORDS = Vocabulary([*SPECIALS, "a", "and", "ball", *COLOURS])
SIDE, STEP = 16, 8  # pixels: of a ball, and of the grid of JPEG's blocks

LEARNS = PretrainingSettings(
    WordMasking(0.4, masked=1.0, random=0.0),
    RegionMasking(0.5, masked=0.3),  # naming those in sight teaches an untrained network to see
    max_elements=None,
    monitored_words=tuple(COLOURS),
)
ALL_WORDS, NO_REGION = WordMasking(1.0, masked=1.0, random=0.0), RegionMasking(0.0)
QUESTIONS = {  # of held-out images
    "as usual": dataclasses.replace(LEARNS, regions=RegionMasking(0.3, masked=1.0)),  # captions name most regions
    "without a word": dataclasses.replace(LEARNS, words=ALL_WORDS, regions=RegionMasking(0.3, masked=1.0)),
    "in full sight": dataclasses.replace(LEARNS, words=ALL_WORDS, regions=NO_REGION),
    "blinded": dataclasses.replace(LEARNS, words=ALL_WORDS, regions=RegionMasking(1.0, masked=1.0)),
}
MODEL = dataclasses.replace(
    TINY_MODEL,
    hidden_size=48,
    dropout=0.0,
    visual_gain_words=0.0,  # as published: the image is faded in
    regions=dataclasses.replace(
        TINY_MODEL.regions,
        resnet=dataclasses.replace(TINY_MODEL.regions.resnet, stride_in_1x1=False, norm="batch"),
        short_side=2 * SIDE,
        long_side=4 * SIDE,
    ),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, and no waiting for other tests' cores: these models are too small for two threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Drawn:
    """storage.reading.Samples: drawn images, in memory."""

    def __init__(self, numbers: range):
        self.all = [drawn(number) for number in numbers]
        self.urls = [sample.url for sample in self.all]

    def __len__(self) -> int:
        return len(self.all)

    def sample(self, number: int) -> Sample:
        return self.all[number]

    def samples(self, numbers: Sequence[int]) -> list[Sample]:
        return [self.all[number] for number in numbers]


def drawn(number: int) -> Sample:
    """Two balls. Boxes keep to the JPEG's blocks, so that nothing of a ball bleeds past a mask."""
    rng = np.random.default_rng(number)
    image = Image.new("RGB", (4 * SIDE, 2 * SIDE), (120, 120, 120))
    boxes, colours = [], []
    for half, choice in enumerate((WARM, COLD)):
        around = np.array([2 * SIDE * half, 0]) + STEP * rng.integers(0, 2, size=2)
        tight = around + STEP * rng.integers(0, 2, size=2)
        colours.append(list(choice)[rng.integers(3)])
        ImageDraw.Draw(image).ellipse([*tight.tolist(), *(tight + SIDE - 1).tolist()], COLOURS[colours[-1]])
        boxes += [[*tight, *(tight + SIDE)], [*around, *(around + SIDE + STEP)]]
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, subsampling=0)
    labels = [1 + list(COLOURS).index(colour) for colour in colours for _ in range(2)]
    caption, url = " and ".join(f"a {colour} ball" for colour in colours), f"http://example.org/{number:06d}.jpg"
    regions = Regions(
        boxes=np.array(boxes, np.float32),
        scores=np.ones(4, np.float32),
        labels=np.array(labels, np.int32),
        detector=DETECTOR,
        class_probs=np.eye(1 + len(COLOURS), dtype=np.float16)[labels],
    )
    key = sample_key(url, caption)
    return Sample(key, file.getvalue(), caption, url, *image.size, sha256="0" * 64, regions=regions)


def learn(model: TaskModel, batches: Sequence[Batch], steps: int, rate: float) -> None:
    """Optimizer steps on these batches in turn."""
    config = OptimizerConfig(learning_rate=rate, warmup_steps=10)
    optimizer = make_optimizer(model, config)
    model.train()
    for step in range(steps):
        set_learning_rate(optimizer, step, steps, config)
        losses = model(batches[step % len(batches)])
        optimizer.zero_grad()
        sum(total / max(1, count) for total, count in losses.values()).backward()
        optimizer.step()
    model.eval()


@pytest.fixture(scope="module")
def held_out() -> Drawn:
    return Drawn(range(10_000, 10_128))


@pytest.fixture(scope="module")
def training() -> list[Batch]:
    """Made once: the same for every model."""
    task = Pretraining(LEARNS, WORDS, len(COLOURS))
    drawings = Drawn(range(512))
    data = TrainingData([TrainingDataset(drawings, task.examples(drawings, None))], task, DATA, MODEL, ALONE)
    return [data[step][0] for step in range(STEPS)]


@pytest.fixture(scope="module")
def means(held_out: Drawn, training: list[Batch]) -> dict[tuple[str, str], dict[str, float]]:
    """By what is masked (pixels or features) and the questions: each metric's mean over three first weights."""
    task = Pretraining(LEARNS, WORDS, len(COLOURS))
    print()
    means = {}
    for masking, names in {"pixels": list(QUESTIONS), "features": ["as usual", "without a word"]}.items():
        config = dataclasses.replace(MODEL, regions=dataclasses.replace(MODEL.regions, masking=masking))
        recipe = Recipe(LEARNS, config, DATA, name="learns", precision="fp32", validation_samples=None)
        runs = {name: [] for name in names}
        for seed in SEEDS:
            torch.manual_seed(seed)
            model = TaskModel(VLBert(config, len(WORDS)), task)
            learn(model, training, STEPS, rate=1e-2)
            for name in names:
                model.task = Pretraining(QUESTIONS[name], WORDS, len(COLOURS))
                questions = model.task.examples(held_out, "val")
                runs[name].append(validate(model, recipe, {"held-out": (held_out, questions)}, ALONE)[0])
        for name in names:
            mean = {metric: float(np.mean([run[metric] for run in runs[name]])) for metric in runs[name][0]}
            print(f"{masking} masked, {name}: {', '.join(f'{metric} {value:.3f}' for metric, value in mean.items())}")
            means[masking, name] = mean
    return means


@pytest.fixture(scope="module")
def commonest(held_out: Drawn) -> float:
    """How often one is right who always says the commonest colour of each half: all that text can tell of a colour."""
    words = [sample.caption.split() for sample in held_out.all]
    counts = [Counter(row[place] for row in words) for place in (1, 5)]
    return float(np.mean([max(count.values()) / count.total() for count in counts]))


def test_a_masked_word_is_learned_from_its_tied_region():
    """Each image has two texts, alike but for the region that [MASK] is tied to: who ignores it is right half the
    time."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    regions = RegionConfig(features="precomputed", resnet=dataclasses.replace(MODEL.regions.resnet, width=1))
    config = dataclasses.replace(MODEL, regions=regions)  # nothing but the encoder has to learn
    task = Pretraining(LEARNS, WORDS, num_classes=len(COLOURS))
    colours = [WORDS.ids[colour] for colour in COLOURS]

    def text(region: int, answer: int) -> TextInput:
        tokens = np.array([WORDS.cls, WORDS.mask, WORDS.sep])
        token_region = np.array([0, region, 0])
        labelled = {"word_label_mask": np.array([False, True, False])}
        return TextInput(tokens, np.zeros(3, np.int64), token_region, labelled, {"words": np.array([answer])})

    examples = []
    for number in range(5):
        features = rng.normal(size=(3, config.regions.channels)).astype(np.float32)
        image = ImageInput(np.array([[0, 0, 63, 31]] * 3, np.float32), np.zeros(3, bool), (64, 32), features=features)
        first, second = rng.choice(colours, size=2, replace=False)
        examples.append(Example(str(number), text(1, first), image, more=(text(2, second),)))
    batch = collate(examples)
    model = TaskModel(VLBert(config, len(WORDS)), task)
    learn(model, [batch], steps=80, rate=5e-3)
    with torch.no_grad():
        words, _ = model.head(model.vlbert, model.vlbert(batch), batch)
    assert (words.argmax(1) == batch.labels["words"]).tolist() == [True] * 10


@pytest.mark.slow
def test_masked_colours_need_the_image(means, commonest):
    seen, blind = means["pixels", "in full sight"], means["pixels", "blinded"]
    print(f"\nmasked colours, by text alone {commonest:.3f} at most")
    assert commonest < 0.4
    assert seen["monitored_accuracy"] > 0.85
    assert seen["monitored_accuracy_shuffled"] < commonest + 0.08
    assert blind["monitored_accuracy"] < commonest + 0.05


@pytest.mark.slow
def test_masked_features_leak_through_overlapping_regions_and_masked_pixels_do_not(means, commonest):
    """The paper's argument for masking raw pixels (3.3). No word is left to tell the class."""
    pixels, features = (means[masking, "without a word"]["regions_accuracy"] for masking in ("pixels", "features"))
    print(f"\nmasked regions without a word: pixels masked {pixels:.3f}, features masked {features:.3f}, chance 0.333")
    assert pixels < commonest + 0.08
    assert features > 0.8
    # Pixels masked, the same question has an answer where the caption gives it: the model did learn to name regions.
    assert means["pixels", "as usual"]["regions_accuracy"] > pixels + 0.2


@pytest.mark.slow
def test_the_grounding_gap_is_what_another_image_takes_away(means):
    reads, leaks = means["pixels", "as usual"], means["features", "as usual"]
    assert reads["monitored_accuracy_grounding_gap"] > 0.15
    assert reads["regions_accuracy_grounding_gap"] > 0.2
    assert leaks["regions_accuracy"] > 0.85, "the better number ..."
    assert abs(leaks["regions_accuracy_grounding_gap"]) < 0.1, "... and the captions were not read for it"
    blind = means["pixels", "blinded"]
    assert blind["words_accuracy"] > 0.75, "most words are told by their places"
    assert abs(blind["words_accuracy_grounding_gap"]) < 0.02
    assert abs(blind["monitored_accuracy_grounding_gap"]) < 0.05
