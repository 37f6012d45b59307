"""Model cards and dataset cards: their numbers against the files that they come from."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from loaded import ALONE
from places import PROJECT
from tiny import DETECTOR, TINY_MODEL, tiny_recipe, tiny_root, tiny_sample

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard, withdraw_samples
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import open_store
from storage.runs import as_json, json_with_digest
from storage.verify import verify
from storage.withdrawn import withdraw
from training.log import read_metrics
from vlbert.commands import main as run_command
from vlbert.hf import VLBertConfig, VLBertModel
from vlbert.hf.cards import main, model_card, write_data_card, write_model_card
from vlbert.train import train
from vlbert.variants import apply

HOSTILE = "<script>alert(1)</script>|x\n# mine\u202eeht\u2066"
ESCAPED = r"\<script\>alert(1)\</script\>\|x # mine\\u202eeht\\u2066"
LICENCES = {0: None, 1: HOSTILE, 2: HOSTILE} | {number: f"own {number}" for number in range(3, 7)} | {7: ""}
STAGE = f"regions/{DETECTOR}"
SHOWN = "CC BY 4.0 12, not recorded 2, {} 2, own 3 1, own 4 1, others 2".format(
    ESCAPED.replace(" # ", r"\\n# ")  # a licence is printed on one line before it is escaped
)
EVALUATED = {
    "inputs": {"checkpoints": ["pretrain-seed0/step-0000006"], "split": "testA", "recipe": "tiny"},
    "examples": {"all": 5, "predicted": 4},
    "data": {"dataset": "coco", "snapshot": "ab" * 8},
    "metrics": {"accuracy": 0.75, "accuracy/yes": 1.0, "unknown": None},
    "trained_on_this_split": False,
    "files": ["predictions.parquet"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root named as the pages name it, with a run of six steps, and images of which some failed."""
    folder = tmp_path_factory.mktemp("cards")
    root = tiny_root(folder, samples=20)
    (folder / "demo-root").symlink_to(root)
    samples = [dataclasses.replace(tiny_sample(i, regions=1 + i % 3), regions=None) for i in range(20)]
    rows = [Row(i, one.key, "ok", "", one.url, LICENCES.get(i, "CC BY 4.0")) for i, one in enumerate(samples)]
    rows += [Row(20 + i, f"{i:020x}", status) for i, status in enumerate(["http_404", "http_404", HOSTILE])]
    meta = {"source": {"list": "/home/someone/captions.tsv sha256:ab", "rows": [0, 23]}}
    assert commit_shard(Catalog(open_store(str(root)), "captions"), "images", "00000", samples, rows, meta)
    train(
        apply(tiny_recipe(root, {"held_out": None, "held_out_share": 0.25}, run_name="pretrain-seed0"), "published"),
        ALONE,
    )
    other = EVALUATED | {"inputs": EVALUATED["inputs"] | {"checkpoints": ["pretrain-seed0/step-0000003"]}}
    for name, summary in (("testA-step-0000006", EVALUATED), ("testA-step-0000003", other)):
        open_store(str(root)).put(f"runs/pretrain-seed0/evaluations/{name}/metrics.json", as_json(summary))
    return root


def table(card: str, *heads: str) -> list[list[str]]:
    """The rows of all tables whose first columns have these heads."""
    head = r" \| ".join(map(re.escape, heads))
    tables = re.findall(rf"^\| {head} \|.*\n\|.*\n((?:\|.*\n)*)", card, re.MULTILINE)
    assert tables
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for found in tables for row in found.splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_model_card_has_the_numbers_of_its_run(root):
    write_model_card(str(root / "runs/pretrain-seed0"))
    card = (root / "runs/pretrain-seed0/step-0000006/README.md").read_text()
    expected = {"accuracy": "0.7500", "accuracy/yes": "1.0000", "unknown": "–"}
    for name, value in read_metrics(open_store(str(root)), "pretrain-seed0", "validation")[-1].items():
        expected |= {} if name in ("kind", "step") else {name: f"{value:.4f}"}
    assert dict(table(card, "metric")) == expected
    assert card.count("Evaluation on testA of coco (snapshot abababababababab): 4 of 5 examples.") == 1
    settings = dict(table(card, "setting"))
    assert settings["examples seen"] == "48 and 24"
    assert settings["id"] == DETECTOR
    assert table(card, "dataset", "regions")[0][:3] == ["captions", STAGE, "100.0%"]
    assert "\n\nHeld out for validation: 25.00% of the samples, by their keys.\n\nRows of all" in card
    assert table(card, "dataset", "stage") == [
        ["captions", "images", f"ok 20, http_404 2, {ESCAPED} 1", SHOWN],
        ["captions", STAGE, "ok 20", "not recorded 13, CC BY 4.0 7"],
    ]
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["library_name"]) == ("unknown", "vlbert")
    assert str(root) not in card, "no path of a machine"
    assert [*verify(Inventory(open_store(str(root))))] == [], "a card in a checkpoint's folder is no fault"


def test_the_runs_before_a_fine_tuning_are_in_its_card(root, tmp_path):
    copied = shutil.copytree(root / "runs/pretrain-seed0", tmp_path / "root/runs/fine")
    state = json.loads((copied / "step-0000006/state.json").read_text())
    del state["own_sha256"]
    start = {"checkpoint": "/elsewhere/converted", "model": None}
    first = {"run": "first", "step": 1200, "batch": 8, "init_from": start}
    first |= {"checkpoint": "/elsewhere/storage/runs/first/step-0001200", "data": state["data"]}
    (copied / "step-0000006/state.json").write_bytes(json_with_digest(state | {"init_from": first}))
    card = model_card(str(copied))
    assert table(card, "run", "steps") == [
        ["first", "1,200", "9,600", f"captions/regions/{DETECTOR}"],
        ["converted", *["not recorded"] * 3],
    ]
    assert "/elsewhere/" not in card
    strange = shutil.copytree(copied / "step-0000006", tmp_path / "strange")
    (strange / "state.json").unlink()
    config = (strange / "config.json").read_text()
    (strange / "config.json").write_text(config.replace('"run_name": "pretrain-seed0"', r'"run_name": "a\u202eb"'))
    assert "\n# a\\\\u202eb\n" in (card := model_card(str(strange)))
    assert all(map(str.isprintable, card.splitlines()))
    assert "Earlier runs" not in model_card(str(root / "runs/pretrain-seed0"))


def test_a_dataset_card_has_the_numbers_of_its_manifests_without_withdrawn_images(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root")
    run = str(root / "runs/pretrain-seed0")
    for folder, arguments in (
        ("runs/pretrain-seed0/step-0000006", ["model", run]),
        ("captions", ["data", root, "captions"]),
    ):
        (root / folder / "README.md").write_text("mine")
        with pytest.raises(SystemExit, match=f"{root / folder}/README.md was not written by this program"):
            main([*map(str, arguments)])
        assert (root / folder / "README.md").read_text() == "mine"
        (root / folder / "README.md").unlink()
    write_data_card(str(root), "captions")
    card = (root / "captions/README.md").read_text()
    statuses = [row[1:] for row in table(card, "stage", "status") if row[0] == "images"]
    assert statuses == [["ok", "20"], ["http_404", "2"], [ESCAPED, "1"]]
    assert [row[4] for row in table(card, "stage", "shards")] == [SHOWN, "not recorded 13, CC BY 4.0 7"]
    assert "<script>" not in card
    assert "\n# mine" not in card
    assert all(map(str.isprintable, card.splitlines())), "nothing reverses the text"
    assert table(card, "host") == [["example.org", "20", "100.0%"]]
    assert "Lists: captions.tsv." in card, "no path of a machine"
    mean = sum(1 + i % 3 for i in range(20)) / 20
    assert dict(table(card, "setting"))["mean number of regions per image"] == f"{mean:.1f}"

    store = open_store(str(root))
    withdraw(store, [tiny_sample(7).url])
    assert all(withdraw_samples(Catalog(store, "captions"), name, "00000") for name in ("images", STAGE))
    write_data_card(str(root), "captions")
    card = (root / "captions/README.md").read_text()
    assert "# captions\n\n19 images with captions" in card
    assert [row[1:] for row in table(card, "stage", "status") if row[0] == STAGE] == [["ok", "19"], ["withdrawn", "1"]]
    with pytest.raises(SystemExit, match="nothing has no committed shard"):
        main(["data", str(root), "nothing"])


def test_the_commands_of_the_pages_run(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    VLBertModel(VLBertConfig(TINY_MODEL, 50)).save_pretrained("vl-bert-base-e2e")
    pages = "\n".join((PROJECT / f"docs/{name}.md").read_text() for name in ("images", "library", "provenance"))
    commands = re.findall(r"^ {4}vlbert ((?:replay|card) .*)", pages, re.MULTILINE)
    assert "card" in {command.split()[0] for command in commands}
    for command in commands:
        words = shlex.split(command)
        run_command(words)
        if "--out" in words:
            assert (root.parent / words[words.index("--out") + 1]).is_file()
    card = (root.parent / "vl-bert-base-e2e/README.md").read_text()
    assert "Metrics: not recorded." in card
    assert "Recipe: not recorded." in card
    assert VLBertModel.from_pretrained("vl-bert-base-e2e").vlbert.config == TINY_MODEL
