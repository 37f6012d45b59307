"""A person's own images ranked by a text, and captions by an image: with a real detector, from the command line."""

import io
import re
from pathlib import Path

import pytest
from PIL import Image
from tiny import tiny_sample

from vlbert.predict import Ranker
from vlbert.predict.command import main

CAPTIONS = ["a red square", "a white circle and a blue square", "a green circle"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images in three formats, one of them in a folder below, and two files that are none."""
    photos = tmp_path_factory.mktemp("photos")
    (photos / "below").mkdir()
    for number, name in enumerate(("a.jpg", "b.png", "c.webp", "below/d.jpg")):
        Image.open(io.BytesIO(tiny_sample(number).image)).save(photos / name)
    (photos / "notes.txt").write_text("no image")
    (photos / "torn.jpg").write_bytes(tiny_sample(1).image[:300])
    return photos


@pytest.mark.parametrize("run", ["retrieval", "related"])
def test_images_of_a_folder_are_ranked_and_files_that_are_none_are_named(models, photos, run, capsys):
    main([f"{models}/runs/{run}", "--among", str(photos), "a red square"])
    printed, skipped = capsys.readouterr()
    ranking = [line.split() for line in printed.splitlines()]
    assert {name for _, name in ranking} == {"a.jpg", "b.png", "c.webp"}
    likely = [float(probability) for probability, _ in ranking]
    assert likely == sorted(likely, reverse=True)
    assert len(set(likely)) > 1
    named = r"note: .* knows drawn shapes only.*\nnote: skipped: .*notes\.txt.*\nnote: skipped: .*torn\.jpg.*\n"
    assert re.fullmatch(named, skipped)


def test_captions_of_a_file_are_ranked_as_each_by_itself(models, photos, tmp_path, capsys):
    photo, run = str(photos / "a.jpg"), f"{models}/runs/retrieval"
    (tmp_path / "captions.txt").write_text("\n".join(["", *CAPTIONS, " "]))
    main([run, photo, "--captions", f"{tmp_path}/captions.txt"])
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    ranker = Ranker(run)
    alone = {caption: ranker.captions(photo, [caption])[0][1] for caption in CAPTIONS}
    expected = sorted(alone, key=alone.get, reverse=True)
    assert [caption for _, caption in printed] == expected
    assert [float(p) for p, _ in printed] == pytest.approx([alone[caption] for caption in expected], abs=6e-4)
    with pytest.warns(UserWarning, match="skipped: .*notes.txt"):
        assert ranker.images(photos, CAPTIONS[0])[0][1] >= alone[CAPTIONS[0]] - 1e-6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["RUNS/retrieval", "--among", "FOLDER/none", "a"], r"No such file or directory: .*none"),
        (["RUNS/retrieval", "--among", "FOLDER/texts", "a"], r"texts holds no image that can be ranked"),
        (["RUNS/retrieval", "photo.jpg", "--captions", "FOLDER/texts/b.txt"], r"b.txt is empty"),
        (["RUNS/refcoco", "--among", "FOLDER/texts", "a"], r"is one of RefCOCOSettings; to rank images or captions"),
        (["RUNS/pretraining", "--among", "FOLDER/texts", "a"], "was pre-trained without the relationship head"),
    ],
)
def test_what_cannot_be_ranked_is_one_line(models, tmp_path, arguments, named):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text(" \n")
    arguments = [one.replace("RUNS", f"{models}/runs").replace("FOLDER", str(tmp_path)) for one in arguments]
    with pytest.raises(SystemExit, match=rf"(?s)^vlbert predict: .*{named}") as raised:
        main(arguments)
    assert "\n" not in str(raised.value)
