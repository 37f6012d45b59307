"""Checkpoints of every task, with random weights, for the tests that predict; and tasks of one's own."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from guides import blocks
from predicted import ON_FEATURES, STARTED, demo_detector, recorded, save_model, save_with_weights
from tiny import VILBERT, tiny_sample

import vlbert.tasks
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.tasks.vqa import VQASettings

PAIRS = dataclasses.replace(VILBERT, regions=dataclasses.replace(ON_FEATURES.regions, masked_features="zeros"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of each task, and with photo.jpg; not to be changed."""
    root = tmp_path_factory.mktemp("models")
    (root / "answers.txt").write_text("yes\nno\nred\n")
    for run, task in {
        "pretraining": PretrainingSettings(max_elements=48),
        "refcoco": RefCOCOSettings(regions="detected"),
        "vcr-answers": VCRSettings(mask_size=2, max_tokens=40),
        "vcr": VCRSettings(mask_size=2, max_tokens=40, subtask="rationale"),
        "retrieval": RetrievalSettings(caption_length=40),
        "related": PretrainingSettings(relationship=True, mismatched=0.5, caption_length=30, max_regions=9),
    }.items():
        save_with_weights(root, run, task, recorded(demo_detector()), model=STARTED)
    featured = recorded(demo_detector(keep_features=True))
    vqa = VQASettings(str(root), answer_list="answers.txt", answers=3, question_length=58, answers_from_words=False)
    save_model(root, "vqa", vqa, featured, model=ON_FEATURES)
    save_with_weights(root, "vqa-pixels", vqa, recorded(demo_detector()), model=STARTED)
    pairs = PretrainingSettings(max_elements=None, max_regions=4, relationship=True, region_head="transform_norm")
    save_model(root, "vilbert", pairs, featured, model=PAIRS)
    (root / "photo.jpg").write_bytes(tiny_sample(3).image)
    return root


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], ModuleType]]:
    """Writes the Python file of a page, in a folder of somebody else's, and imports it: (page, name)."""
    monkeypatch.setattr(vlbert.tasks, "TASKS", {**vlbert.tasks.TASKS})  # which it adds its own to
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(page: str, name: str) -> ModuleType:
        (code,) = blocks(page, "python")
        (tmp_path / f"{name}.py").write_text(code)
        names.append(name)
        return importlib.import_module(name)

    yield write
    for name in names:
        del sys.modules[name]
