"""From a detector that keeps its features to a model that trains on them: no pixel is decoded on the way."""

import dataclasses
import math
from pathlib import Path

import pytest
from family import VLBERT
from imported_features import image_features, write_json, write_tsv
from tiny import TINY_MODEL, tiny_recipe, tiny_sample
from tiny_detector import commit_images
from vqa_files import coco, write_vqa

from detectors.run import main
from storage.object_store import open_store
from training.distributed import ALONE
from training.log import read_metrics
from vlbert.config import DataConfig
from vlbert.tasks.vqa import VQASettings
from vlbert.train import train


def test_a_pretraining_and_a_finetuning_run_on_imported_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """VL-BERT's JSON for the captions, bottom-up attention's TSV for VQA's images."""
    monkeypatch.setattr("vlbert.data.images._decode", lambda sample: pytest.fail("an image was decoded"))
    root, channels = tmp_path / "root", TINY_MODEL.regions.channels
    captioned = [dataclasses.replace(tiny_sample(i), regions=None) for i in range(8)]
    commit_images(root, [captioned])
    files = [image_features(f"{i:06d}", i, channels=channels) for i in range(8)]
    imported = ["--backend=imported", "--keep_features"]
    main([str(root), "captions", *imported, f"--imported.files={write_json(tmp_path / 'frcnn.zip', files)}"])
    data = dataclasses.replace(tiny_recipe(root).data, text_batch=0, held_out=None, batch=4)
    changes = {"steps": 2, "save_every": 2, "vocabulary": None, "vocabulary_size": 120}
    pretraining = tiny_recipe(root, run_name="pretrain", model=VLBERT, data=data, **changes)
    train(pretraining, ALONE)
    (line, _) = read_metrics(open_store(str(root)), "pretrain", "training")
    assert all(math.isfinite(line[name]) for name in ("loss_words", "loss_regions"))

    images = coco([dataclasses.replace(tiny_sample(i), regions=None) for i in range(4)], "train2014")
    commit_images(root, [images], dataset="vqa")
    tsv = write_tsv(tmp_path / "trainval.tsv", [dataclasses.replace(files[i], name=str(i)) for i in range(4)])
    main([str(root), "vqa", *imported, f"--imported.files={tsv}", "--imported.match=number"])
    write_vqa(tmp_path / "vqa", "train2014", {10 * i: ["yes"] * 10 for i in range(4)})
    (tmp_path / "vqa" / "answers_vqa.txt").write_text("yes\nno\n")
    finetuning = dataclasses.replace(
        pretraining,
        run_name="vqa",
        task=VQASettings(str(tmp_path / "vqa"), answers=2, question_length=20),
        data=DataConfig(root=str(root), datasets={"vqa": None}, batch=4, workers=0, flip=0.0),
        init_from=f"{root}/runs/pretrain/step-0000002",
    )
    train(finetuning, ALONE)
    lines = read_metrics(open_store(str(root)), "vqa", "training")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss_answers"]) for line in lines)
    nameless = dataclasses.replace(data, datasets={"vqa": None})
    with pytest.raises(ValueError, match="have no class_probs"):
        train(dataclasses.replace(pretraining, run_name="nameless", data=nameless), ALONE)
