"""Model cards, dataset cards and Croissant: their numbers against the files that they come from."""

import dataclasses
import hashlib
import json
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from loaded import ALONE
from places import PROJECT
from storage.forgotten import forget
from tiny import DETECTOR, TINY_MODEL, commit_samples, tiny_recipe, tiny_root, tiny_sample

from storage.catalog import Catalog
from storage.catalog.commit import commit_shard
from storage.garbage import collect_garbage
from storage.inventory import Inventory
from storage.manifests import Row
from storage.object_store import open_store
from storage.runs import as_json, sealed_json
from storage.settings import to_json
from storage.verify import verify
from training.log import read_metrics
from vlbert import VLBert
from vlbert.commands import main as run_command
from vlbert.hf.cards import main, model_card, write_data_card, write_model_card
from vlbert.train import train
from vlbert.variants import paper, published

HOSTILE = "<script>alert(1)</script>|x"
ESCAPED = r"\<script\>alert(1)\</script\>\|x"
LICENCES = {0: None, 1: HOSTILE, 2: HOSTILE} | {number: f"own {number}" for number in range(3, 7)}  # of image 0, 1, ...
SHOWN = f"CC BY 4.0 13, {ESCAPED} 2, own 3 1, own 4 1, own 5 1, others 1, not recorded 1"


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
    train(tiny_recipe(root, run="pretrain"), ALONE)
    return root


def front_matter(card: str) -> dict:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def table(card: str, *heads: str) -> list[list[str]]:
    """The rows of all tables whose first columns have these heads."""
    head = r" \| ".join(map(re.escape, heads))
    tables = re.findall(rf"^\| {head} \|.*\n\|.*\n((?:\|.*\n)*)", card, re.MULTILINE)
    assert tables
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for found in tables for row in found.splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_model_card_has_the_numbers_of_its_run(root):
    card = Path(write_model_card(str(root / "runs/pretrain"))).read_text()
    metrics = read_metrics(open_store(str(root)), "pretrain", "validation")[-1]
    assert sorted(table(card, "metric")) == [
        [name, *(f"{metrics[name + more]:.4f}" for more in ("", "_shuffled", "_grounding_gap"))]
        for name in ("regions_accuracy", "words_accuracy")
    ]
    settings = dict(table(card, "setting"))
    assert settings["examples seen"] == "48 and 24"
    assert settings["recipe"] == "tiny"
    assert settings["id"] == DETECTOR
    assert table(card, "dataset", "stage") == [
        ["captions", "images", f"ok 20, http_404 2, {ESCAPED} 1", SHOWN],
        ["captions", f"regions/{DETECTOR}", "ok 20", "CC BY 4.0 7, not recorded 13"],
    ]
    costs = dict(table(card, "what"))
    assert costs["FLOPs of a step"] == "not recorded"
    assert costs["hardware, of the last process"] == f"1 x CPU (threads: {torch.get_num_threads()})"
    found = front_matter(card)
    assert (found["license"], found["library_name"]) == ("unknown", "vlbert")
    (result,) = found["model-index"][0]["results"]
    assert result["dataset"]["name"] == "held-out"
    assert {one["type"]: one["value"] for one in result["metrics"]} == {
        name: value for name, value in metrics.items() if name not in ("kind", "step")
    }
    assert str(root) not in card, "no path of a machine"
    assert [*verify(Inventory(open_store(str(root))))] == [], "a card in a checkpoint's folder is no fault"


def test_the_runs_before_a_fine_tuning_are_in_its_card(root, tmp_path):
    copied = shutil.copytree(root / "runs/pretrain", tmp_path / "root/runs/fine")
    state = json.loads((copied / "step-0000006/state.json").read_text())
    del state["own_sha256"]
    start = {"checkpoint": "/elsewhere/converted", "model": None}
    first = {"run": "first", "step": 1200, "batch": 8, "init_from": start}
    first |= {"checkpoint": "/elsewhere/root/runs/first/step-0001200", "data": state["data"]}
    (copied / "step-0000006/state.json").write_bytes(sealed_json(state | {"init_from": first}))
    card = model_card(str(copied))
    assert table(card, "run", "steps") == [
        ["first", "1,200", "9,600", f"captions/regions/{DETECTOR}"],
        ["converted", *["not recorded"] * 3],
    ]
    assert "/elsewhere/" not in card
    assert "Before it" not in model_card(str(root / "runs/pretrain"))


def test_what_a_comparison_or_an_evaluation_recorded_is_in_the_card(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "root")
    store = open_store(str(root))
    store.put("comparisons/plan/costs/pretrain.json", as_json({"flops": 2_000_000}))
    evaluated = {
        "inputs": {"checkpoints": ["pretrain/step-0000006"], "split": "testA", "recipe": "tiny"},
        "examples": {"all": 5, "predicted": 4},
        "data": {"dataset": "coco", "snapshot": "ab" * 8},
        "metrics": {"accuracy": 0.75, "accuracy/yes": 1.0, "unknown": None},
        "trained_on_this_split": False,
        "files": ["predictions.parquet"],
    }
    other = evaluated | {"inputs": evaluated["inputs"] | {"checkpoints": ["pretrain/step-0000003"]}}
    for folder, summary in (("testA-step-0000006", evaluated), ("testA-step-0000003", other)):
        store.put(f"runs/pretrain/evaluations/{folder}/metrics.json", as_json(summary))
    card = model_card(str(root / "runs/pretrain"))
    costs = dict(table(card, "what"))
    assert costs["FLOPs of a step"] == "2e+06"
    assert costs["FLOPs of the training, that of a step times the steps"] == "1.2e+07"
    assert card.count("Evaluation on testA of coco (snapshot abababababababab): 4 of 5 examples.") == 1
    assert ["accuracy", "0.7500"] in table(card, "metric")
    assert len(front_matter(card)["model-index"][0]["results"]) == 2


def test_the_flops_of_a_step_are_counted_on_its_batch(root):
    counted = float(dict(table(model_card(str(root / "runs/pretrain"), flops=True), "what"))["FLOPs of a step"])
    encoder = sum(one.numel() for one in VLBert(TINY_MODEL, 120).encoder.parameters())
    rows, least = 12, 8  # elements of a row at least
    assert counted > 3 * 2 * encoder * rows * least, "forward and twice that backward, of the encoder alone"


@pytest.mark.parametrize(("name", "change"), [("paper", paper), ("published code", published)])
def test_a_variant_is_named_by_the_rules_that_it_follows(root, tmp_path, name, change):
    changed = change(tiny_recipe(root))
    folder = shutil.copytree(root / "runs/pretrain/step-0000006", tmp_path / "model")
    (folder / "state.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {"recipe": to_json(changed), "model": to_json(changed.model)}
    (folder / "config.json").write_text(json.dumps(config))
    assert dict(table(model_card(str(folder)), "setting"))["variant"] == name


def test_a_model_in_any_folder_has_a_card_of_what_is_known(tmp_path):
    VLBert(TINY_MODEL, 50).save_pretrained(tmp_path / "mine")
    card = Path(write_model_card(str(tmp_path / "mine"))).read_text()
    assert "Metrics: not recorded." in card
    assert "Recipe: not recorded." in card
    numbers = dict(table(card, "what"))["numbers in model.safetensors"]
    assert int(numbers.replace(",", "")) == sum(one.numel() for one in VLBert(TINY_MODEL, 50).state_dict().values())
    assert VLBert.from_pretrained(tmp_path / "mine").config == TINY_MODEL


@pytest.mark.parametrize("kind", ["model", "data"])
def test_a_readme_of_somebody_is_kept(root, tmp_path, kind):
    root = shutil.copytree(root, tmp_path / "root")
    file = root / ("runs/pretrain/step-0000006" if kind == "model" else "captions") / "README.md"
    file.write_text("mine")
    arguments = [str(root / "runs/pretrain")] if kind == "model" else [str(root), "captions"]
    with pytest.raises(SystemExit, match=f"{file} is not a card of this program"):
        main([kind, *arguments])
    assert file.read_text() == "mine"
    main(["model", str(root / "runs/pretrain"), f"out={tmp_path / 'elsewhere'}"])
    assert (tmp_path / "elsewhere" / "README.md").is_file()


def test_a_dataset_card_has_the_numbers_of_its_manifests(root):
    write_data_card(str(root), "captions")
    card = (root / "captions/README.md").read_text()
    assert front_matter(card)["size_categories"] == ["n<1K"]
    statuses = [row[1:] for row in table(card, "stage", "status") if row[0] == "images"]
    assert statuses == [["ok", "20"], ["http_404", "2"], [ESCAPED, "1"]]
    assert [row[4] for row in table(card, "stage", "shards")] == [SHOWN, "CC BY 4.0 7, not recorded 13"]
    assert "<script>" not in card
    assert table(card, "host") == [["example.org", "20", "100.0%"]]
    assert table(card, "pixels") == [["width", *["96"] * 5], ["height", *["64"] * 5]]
    assert "Made of: captions.tsv." in card, "no path of a machine"
    assert dict(table(card, "setting"))["regions of an image, mean"] == f"{sum(1 + i % 3 for i in range(20)) / 20:.1f}"
    snapshot = Catalog(open_store(str(root)), "captions").snapshot(f"regions/{DETECTOR}")
    assert table(card, "id") == [[snapshot.id, snapshot.stage, "3", "20"]]


def test_croissant_names_every_tar_and_the_columns_of_the_snapshot(root):
    write_data_card(str(root), "captions")
    folder = root / "captions"
    found = json.loads((folder / "croissant.json").read_text())
    files = [one for one in found["distribution"] if one["@type"] == "cr:FileObject"]
    on_disk = [*(folder / f"regions/{DETECTOR}").glob("*.tar"), *folder.glob(f"regions/{DETECTOR}/snapshots/*")]
    assert {one["contentUrl"] for one in files} == {str(path.relative_to(folder)) for path in on_disk}
    for one in files:
        data = (folder / one["contentUrl"]).read_bytes()
        assert (one["sha256"], one["contentSize"]) == (hashlib.sha256(data).hexdigest(), f"{len(data)} B")
    sets = {one["@id"]: one for one in found["distribution"] if one["@type"] == "cr:FileSet"}
    for name, suffix in (("images", ".jpg"), ("annotations", ".json")):
        assert sets[name]["includes"] == f"*{suffix}"
        tars = [folder / f"regions/{DETECTOR}" / one["@id"] for one in sets[name]["containedIn"]]
        members = []
        for tar in tars:
            with tarfile.open(tar) as opened:
                members += opened.getnames()
        assert sum(member.endswith(suffix) for member in members) == 20
    (records,) = found["recordSet"]
    (snapshot,) = (one for one in files if one["contentUrl"].endswith(".parquet"))
    columns = pq.read_schema(folder / snapshot["contentUrl"]).names
    for one in records["field"]:
        assert one["source"]["fileObject"]["@id"] == snapshot["@id"]
        assert one["source"]["extract"]["column"] in columns


@pytest.mark.parametrize("collected", [False, True])
def test_croissant_offers_nothing_that_was_forgotten(tmp_path, collected):
    samples = [tiny_sample(i) for i in range(6)]
    commit_samples(tmp_path, "captions", samples)
    store = open_store(str(tmp_path))
    Catalog(store, "captions").pin(f"regions/{DETECTOR}")
    forget(store, [samples[2].url])
    if collected:
        collect_garbage(store, 0, delete=True)
    write_data_card(str(tmp_path), "captions")
    folder = tmp_path / "captions"
    found = json.loads((folder / "croissant.json").read_text())
    files = [one for one in found["distribution"] if one["@type"] == "cr:FileObject"]
    for one in files:
        assert one["sha256"] == hashlib.sha256((folder / one["contentUrl"]).read_bytes()).hexdigest()
    (snapshot,) = (one["contentUrl"] for one in files if one["contentUrl"].endswith(".parquet"))
    urls = pq.read_table(folder / snapshot, columns=["url"])["url"].to_pylist()
    assert urls == [one.url for i, one in enumerate(samples) if i != 2]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\n")
    assert "# captions\n\n5 images with captions" in card
    statuses = {row[1]: row[2] for row in table(card, "stage", "status")}
    assert statuses == ({"ok": "5", "forgotten": "1"} if collected else {"ok": "6"})
    assert ("1 of the ok rows of regions/" in card) is not collected


def test_a_dataset_without_snapshot_has_no_samples_in_croissant(tmp_path):
    commit_samples(tmp_path, "captions", [tiny_sample(0)])
    main(["data", str(tmp_path), "captions"])
    assert json.loads((tmp_path / "captions/croissant.json").read_text())["recordSet"] == []
    assert "No training has pinned one." in (tmp_path / "captions/README.md").read_text()
    with pytest.raises(SystemExit, match="nothing holds no committed shard"):
        main(["data", str(tmp_path), "nothing"])


@pytest.mark.slow
def test_mlcroissant_reads_it(root):
    """MLCommons' own reader, in an environment of its own: its pandas and scipy are not needed otherwise."""
    program = shutil.which("mlcroissant")
    if program is None:
        pytest.skip("there is no mlcroissant on the PATH: pip install mlcroissant[parquet], in another environment")
    write_data_card(str(root), "captions")
    file = str(root / "captions/croissant.json")
    validated = subprocess.run([program, "validate", "--jsonld", file], capture_output=True, text=True, timeout=120)
    assert validated.returncode == 0, validated.stderr[-2000:]
    assert "error" not in validated.stderr.lower()
    options = ["load", "--jsonld", file, "--record_set", "samples", "--num_records", "-1"]
    loaded = subprocess.run([program, *options], capture_output=True, text=True, timeout=120)
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    printed = loaded.stdout + loaded.stderr
    assert all(tiny_sample(i, regions=1 + i % 3).key in printed for i in range(20))


def test_the_commands_of_the_pages_run(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    VLBert(TINY_MODEL, 50).save_pretrained("mine")
    pages = [PROJECT / "docs" / f"{name}.md" for name in ("operating", "download", "library")]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    commands = [line for line in lines if re.match(r" {4}vlbert (replay|card) ", line)]
    assert len(commands) == 3
    for command in commands:
        run_command(shlex.split(command)[1:])
    for written in ("step-3.html", "demo-root/captions/croissant.json", "mine/README.md"):
        assert (root.parent / written).is_file()
