"""Our data layer beside the authors': records run through their data sets, from the same uniform draws."""

import base64
import functools
import io
import json

import numpy as np
import pytest
from PIL import Image
from places import SHARED

from detectors.resnet import ResNetConfig
from storage.sample import Regions, Sample
from vlbert.config import RegionConfig
from vlbert.data.batch import collate
from vlbert.data.corpus import TextCorpus, make_corpus
from vlbert.data.images import prepare_image
from vlbert.data.vocabulary import Vocabulary
from vlbert.datasets.vcr import instance_mask
from vlbert.model.fast_rcnn import FastRCNN
from vlbert.tasks.pretraining import Pretraining, PretrainingSettings
from vlbert.tasks.vcr import VCR, VCRSettings

PARITY = SHARED / "parity" / "vlbert"
DATA = PARITY / "data"
RECORDS = 3
TINY_RESNET = ResNetConfig(blocks=(1, 1, 1, 1), width=4, stem_pool="torch")  # only what stands before it is looked at

pytestmark = pytest.mark.skipif(
    not (PARITY / "data_layer.npz").is_file(), reason="the authors' figures lie in ../shared, which is not here"
)


class Draws:
    """A numpy Generator whose uniform numbers were drawn before: words', then regions'; its choice is always `hat`."""

    def __init__(self, *draws: np.ndarray):
        self.draws = list(draws)

    def random(self, count: int) -> np.ndarray:
        """The first `count` of the next draws: what the sample lost to truncation was drawn for, too."""
        drawn = self.draws.pop(0)
        assert count <= len(drawn)
        return drawn[:count]

    def choice(self, ordinary: np.ndarray, size: int) -> np.ndarray:
        # Theirs chooses among all ids, [PAD] with them, which their loader then takes for the end of the text; ours
        # among the ordinary pieces. This differs on purpose, and the draws never show it.
        assert vocabulary().pad not in ordinary
        return np.full(size, vocabulary().ids["hat"])


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.read(DATA / "vocab.txt")


@functools.cache
def figures() -> dict[str, np.ndarray]:
    with np.load(PARITY / "data_layer.npz") as arrays:
        return dict(arrays)


@functools.cache
def rows(name: str) -> list[dict]:
    """The entries of data_layer.json that hold `name`."""
    return [row for row in json.loads((PARITY / "data_layer.json").read_text()) if name in row]


@functools.cache
def sample(number: int) -> Sample:
    """A record of theirs as ours: regions in the order of their loader, by the largest probability of any class."""
    record = json.loads((DATA / "cc" / "train_frcnn.json").read_text().splitlines()[number])
    found = json.loads((DATA / "cc" / record["frcnn"].replace(".zip@", "")).read_text())
    arrays = {
        name: np.frombuffer(base64.b64decode(found[name]), np.float32).reshape(found["num_boxes"], -1)
        for name in ("boxes", "classes", "features")
    }
    order = np.argsort(-arrays["classes"].max(axis=1), kind="stable")
    boxes, classes, features = (arrays[name][order] for name in ("boxes", "classes", "features"))
    jpeg = io.BytesIO()
    image = Image.open(DATA / "cc" / record["image"].replace(".zip@", "")).convert("RGB")
    image.save(jpeg, "JPEG", quality=100, subsampling=0)  # a sample is a JPEG; this one is within a level or two
    return Sample(
        key=f"record {number}",
        image=jpeg.getvalue(),
        caption=" ".join(record["caption"]),
        url=record["image"],
        width=found["image_w"],
        height=found["image_h"],
        sha256="0" * 64,
        regions=Regions(
            boxes=boxes,
            scores=classes[:, 1:].max(axis=1),
            labels=1 + classes[:, 1:].argmax(axis=1).astype(np.int32),
            detector="theirs",
            class_probs=classes.astype(np.float16),
            features=features.astype(np.float16),
        ),
    )


def config(kind: str) -> RegionConfig:
    if kind == "prec":
        return RegionConfig("precomputed", short_side=120, long_side=200)
    return RegionConfig("end_to_end", short_side=120, long_side=200, resnet=TINY_RESNET)


@pytest.mark.parametrize(
    ("kind", "flip", "number"),
    [(kind, flip, number) for kind in ("prec", "e2e") for flip in (0, 1) for number in range(RECORDS)],
)
def test_words_and_regions_are_masked_labelled_truncated_and_computed_from_as_by_the_authors(kind, flip, number):
    def theirs(name: str) -> np.ndarray:
        return figures()[f"cc_{kind}_flip{flip}/{number}/{name}"]

    task = Pretraining(PretrainingSettings(), vocabulary(), num_classes=1600)
    image = prepare_image(sample(number), config(kind), bool(flip))
    found = task.example(sample(number), image, None, Draws(theirs("in_u_words"), theirs("in_u_boxes")))
    words, image = found.text, found.image
    np.testing.assert_array_equal(words.tokens, theirs("text"))
    labels = np.full(len(words.tokens), -1)
    labels[words.label_masks["word_label_mask"]] = words.labels["words"]
    np.testing.assert_array_equal(labels, theirs("mlm_labels"))
    assert not words.segments.any()
    assert not words.token_region.any()
    np.testing.assert_allclose(image.boxes, theirs("boxes"), atol=1e-4)
    np.testing.assert_array_equal(image.masked, theirs("mvrc_ops") == 1)
    labelled = image.label_masks["region_label_mask"]
    np.testing.assert_array_equal(labelled, theirs("mvrc_labels_sum") > 0.5)
    classes = image.labels["region_classes"]
    np.testing.assert_array_equal(classes.argmax(axis=1), theirs("mvrc_labels_argmax")[labelled])
    # Class distributions are kept as float16.
    np.testing.assert_allclose(classes.max(axis=1), theirs("mvrc_labels_max")[labelled], atol=5e-4)
    np.testing.assert_allclose(classes.sum(axis=1), theirs("mvrc_labels_sum")[labelled], atol=2e-3)
    # The whole image's feature is the mean of unmasked pixels. Pixels: blue, green, red in this order, the mean off,
    # masked regions at zero: those that were cut away, too.
    if kind == "prec":
        features = found.image.features  # kept as float16
        np.testing.assert_allclose(features[:, :8], theirs("features_first8"), rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(features.sum(axis=1), theirs("features_sum"), rtol=1e-3, atol=2e-3)
        return
    mine = FastRCNN(config("e2e")).network_input(collate([found]))[0][0]
    assert list(mine.shape) == theirs("image_shape").tolist()
    mine, image = mine[:, ::4, ::4].numpy(), theirs("image_sub4")
    hole = (image == 0).all(axis=0)
    assert hole.any()
    np.testing.assert_array_equal((mine == 0).all(axis=0), hole)
    apart = np.abs(mine - image)
    assert apart.max() < 5, "a few levels of a JPEG"
    assert apart.mean() < 0.6


def test_rows_of_the_text_corpus_are_the_authors(tmp_path):
    """A line and those behind it, round the end of the file, are 64 pieces without [CLS] and [SEP]."""
    make_corpus(tmp_path, [DATA / "corpus.txt"], DATA / "vocab.txt", size=0, captions=[])
    task = Pretraining(PretrainingSettings(), vocabulary(), num_classes=1600)
    passages = TextCorpus(tmp_path, vocabulary()).passages(np.arange(4), 64)
    for line, passage in zip(range(4), passages, strict=True):
        theirs = {name: figures()[f"gc/{line}/{name}"] for name in ("in_u_words", "ids", "mlm_labels")}
        row = task.text_example(f"text-{line}", passage, Draws(theirs["in_u_words"]))
        np.testing.assert_array_equal(row.text.tokens, theirs["ids"])
        labels = np.full(64, -1)
        labels[row.text.label_masks["word_label_mask"]] = row.text.labels["words"]
        np.testing.assert_array_equal(labels, theirs["mlm_labels"])
        assert row.image is None


@pytest.mark.parametrize("number", range(2))
def test_vcr_tokens_and_tags_are_the_authors(number):
    row = rows("vcr_tokens")[number]
    pieces, regions = VCR(VCRSettings(), vocabulary(), 1).tagged(row["vcr_tokens"], row["object_names"])
    ids, tags, _ = zip(*row["ids_tags_align"], strict=True)
    assert (tuple(pieces.tolist()), tuple(regions.tolist())) == (ids, tags)


def test_an_object_covers_the_authors_cells():
    (row,) = rows("vcr_mask_poly")
    mask = instance_mask([np.array(row["vcr_mask_poly"])], np.array(row["box"][:4]), side=14)
    np.testing.assert_array_equal(mask, figures()["vcr_mask/0"])
