"""A person's own images ranked by a text, and captions by an image: with a real detector, from the command line."""

from pathlib import Path

import pytest
from PIL import Image
from predicted import STARTED, demo_detector, recorded, save_model
from tiny import tiny_sample

from vlbert.predict import Ranker
from vlbert.predict.command import main
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.retrieval import RetrievalSettings

CAPTIONS = ["a red square", "a white circle and a blue square", "a green circle"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of retrieval, one of pre-training with the relationship head and others; photos/ with images in
    three formats and two files that are none."""
    root = tmp_path_factory.mktemp("ranking")
    detector = recorded(demo_detector())
    related = PretrainingSettings(relationship=True, mismatched=0.5, caption_length=30, max_regions=9)
    for run, task in {
        "retrieval": RetrievalSettings(caption_length=40),
        "related": related,
        "plain": PretrainingSettings(),
        "refcoco": RefCOCOSettings(),
    }.items():
        save_model(root, run, task, detector, model=STARTED)
    photos = root / "photos"
    (photos / "below").mkdir(parents=True)
    for number, name in enumerate(("a.jpg", "b.png", "c.webp", "below/d.jpg")):
        (photos / "photo.jpg").write_bytes(tiny_sample(number).image)
        Image.open(photos / "photo.jpg").save(photos / name)
    (photos / "photo.jpg").unlink()
    (photos / "notes.txt").write_text("no image")
    (photos / "torn.jpg").write_bytes(tiny_sample(1).image[:300])
    (root / "captions.txt").write_text("\n".join(["", *CAPTIONS, " "]))
    return root


@pytest.mark.parametrize("run", ["retrieval", "related"])
def test_images_of_a_folder_are_ranked_and_files_that_are_none_are_named(root, run, capsys):
    main([f"{root}/runs/{run}", "--among", f"{root}/photos", "a red square"])
    printed, skipped = capsys.readouterr()
    ranking = [line.split() for line in printed.splitlines()]
    assert {name for _, name in ranking} == {"a.jpg", "b.png", "c.webp"}
    likely = [float(probability) for probability, _ in ranking]
    assert likely == sorted(likely, reverse=True)
    assert len(set(likely)) > 1
    lines = skipped.splitlines()
    assert [line.startswith("note: skipped: ") for line in lines] == [True, True]
    assert ["notes.txt" in lines[0], "torn.jpg" in lines[1]] == [True, True]


def test_captions_of_a_file_are_ranked_as_each_by_itself(root, capsys):
    photo = f"{root}/photos/a.jpg"
    main([f"{root}/runs/retrieval", photo, "--captions", f"{root}/captions.txt"])
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    ranker = Ranker(f"{root}/runs/retrieval")
    alone = {caption: ranker.captions(photo, [caption])[0][1] for caption in CAPTIONS}
    expected = sorted(alone, key=alone.get, reverse=True)
    assert [caption for _, caption in printed] == expected
    assert [float(p) for p, _ in printed] == pytest.approx([alone[caption] for caption in expected], abs=6e-4)
    with pytest.warns(UserWarning, match="skipped: .*notes.txt"):
        assert ranker.images(root / "photos", CAPTIONS[0])[0][1] >= alone[CAPTIONS[0]] - 1e-6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["RUNS/retrieval", "--among", "FOLDER/none", "a"], r"No such file or directory: .*none"),
        (["RUNS/retrieval", "--among", "FOLDER/texts", "a"], r"texts holds no image that can be ranked"),
        (["RUNS/retrieval", "photo.jpg", "--captions", "FOLDER/texts/b.txt"], r"b.txt is empty"),
        (["RUNS/refcoco", "--among", "FOLDER/texts", "a"], r"is one of RefCOCOSettings; to rank images or captions"),
        (
            ["RUNS/plain", "--among", "FOLDER/texts", "a"],
            r"runs/plain/.* was pre-trained without the relationship head",
        ),
    ],
)
def test_what_cannot_be_ranked_is_one_line(root, tmp_path, arguments, named, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text(" \n")
    arguments = [one.replace("RUNS", f"{root}/runs").replace("FOLDER", str(tmp_path)) for one in arguments]
    with pytest.raises(SystemExit, match=rf"(?s)^vlbert predict: .*{named}") as raised:
        main(arguments)
    assert "\n" not in str(raised.value)
