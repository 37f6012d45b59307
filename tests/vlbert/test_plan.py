"""The plan of a road from a list to a model: predicted beside counted, and what is refused."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from captioned import captioned_scenes
from s3 import https_s3_server
from tiny import as_overrides
from web import Web, draw, encode, send

from demo.data import DemoData
from demo.deployments import SHIPPED_DETECTOR, detection_of_demo
from detectors.faster_rcnn import FasterRCNNConfig
from detectors.run import detect_pending, make_detector, stage_of, stage_size
from storage.catalog import Catalog
from storage.collect.run import IMAGES, collect
from storage.manifests import OK
from storage.object_store import ObjectStore, open_store
from storage.settings import assignments_of, override
from training.distributed import World
from vlbert.config import Recipe
from vlbert.data.corpus import make_corpus
from vlbert.plan import main
from vlbert.recipes import RECIPES
from vlbert.train import train

CARDS = {"h100": SimpleNamespace(name="H100 SXM", memory=80e9, price=2.5)}
BASE, MEASURED = "pretrain_vlbert_base", 0.494  # seconds of a step of 128 pairs on one H100 (docs/performance.md)


@dataclasses.dataclass
class Measured:
    """In place of a rehearsal: `seconds` on every card."""

    spent: float
    peak: int

    def seconds(self, card: object) -> float:
        return self.spent


def rehearsal(step: float, peak: float) -> SimpleNamespace:
    """A step of 128 pairs takes `step` s and `peak` bytes, eight images take 0.1 s."""

    def rehearse_training(recipe: Recipe, pairs: int, texts: int) -> Measured:
        return Measured(step * pairs / 128, int(peak * pairs / 128))

    def rehearse_detection(network: FasterRCNNConfig, images: int, precision: str, tf32: bool) -> Measured:
        return Measured(0.1 * images / 8, 10**10)

    return SimpleNamespace(rehearse_training=rehearse_training, rehearse_detection=rehearse_detection)


def planned(tmp_path: Path, *arguments: str, step: float = MEASURED, peak: float = 60.9e9) -> dict:
    """What the command writes as JSON, with this rehearsal."""
    file = tmp_path / "plan.json"
    main([*arguments, "--json", str(file)], CARDS, rehearsal(step, peak))
    return json.loads(file.read_text())


def stages(plan: dict) -> dict[str, dict]:
    return {one["name"]: one for one in plan["stages"]}


def checks(plan: dict) -> dict[str, dict]:
    return {one["what"]: one for one in plan["checks"]}


# --- beside what is counted -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Road:
    """The demo's road on a real S3: requests by stage, as the server counts them, and the plan of the same list."""

    store: ObjectStore
    recipe: Recipe
    requests: dict[str, int]
    plan: dict
    ok: int
    stage: str

    def bytes(self, prefix: str, *ends: str) -> int:
        return sum(
            info.size for info in self.store.list(prefix) if info.path.endswith(ends) and "/claims/" not in info.path
        )

    def lengths(self, stage: str) -> int:
        """Bytes of all samples in their tars."""
        columns = Catalog(self.store, "captions").columns(stage, ["length"])
        return sum(length or 0 for table in columns for length in table["length"].to_pylist())


@pytest.fixture(scope="module")
def road(demo_data: DemoData, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    folder, requests = tmp_path_factory.mktemp("road"), {}
    settings, detection = captioned_scenes(demo_data), detection_of_demo(SHIPPED_DETECTOR)
    make_corpus(folder / "text", [demo_data.text], vocabulary=None, size=200, captions=[demo_data.train_tsv])
    with https_s3_server(folder, "bucket") as came:
        root = "s3://bucket/root"
        made = RECIPES["pretrain_vlbert_demo"]()
        changes = [f"data.root={root}", f"data.text_corpus={folder}/text", f"vocabulary={folder}/text/vocab.txt"]
        changes += ["data.held_out=none", f"model.regions.weights={SHIPPED_DETECTOR}", "steps=12", "save_every=4"]
        recipe = override(made, [*changes, "data.batch=4", "data.text_batch=2"])

        def counted(name: str, work: Callable[[], object]) -> object:
            came.clear()
            found = work()
            requests[name] = len(came)
            return found

        collected = counted("collection", lambda: collect(root, settings, lambda line: None))
        detector, regions = make_detector(detection), []

        def detect() -> None:
            catalog = Catalog(open_store(root), "captions")
            detect_pending(catalog, detector, lambda report: regions.append(report["regions"]))
            stage_size(catalog, stage_of(detector))

        counted("detection", detect)
        counted("pre-training", lambda: train(recipe, World(0, 1, torch.device("cpu"))))
        ok = collected.counts[OK]
        plan = planned(
            folder,
            *("pretrain_vlbert_demo", "--list", str(demo_data.train_tsv), "--sample", "--preset", "demo"),
            *[part for one in assignments_of(settings)[2:] for part in ("--collect", one)],
            *[part for one in ("network.post_nms=30", "selection.minimum=3") for part in ("--detect", one)],
            *("--regions", str(sum(regions) / ok)),
            *as_overrides(recipe, made),
        )
        yield Road(open_store(root), recipe, requests, plan, ok, stage_of(detector))


def test_a_sample_of_the_whole_list_gives_the_images_that_a_collection_stores(road: Road):
    assert road.plan["images"] == road.ok == 24
    assert (
        road.plan["survival"]["low"] == road.plan["survival"]["high"] == pytest.approx(24 / 31)
    )  # one row is repeated
    assert sum(road.plan["survival"]["statuses"].values()) == 31


@pytest.mark.parametrize(("stage", "within"), [("collection", 0.02), ("detection", 0.02), ("pre-training", 0.15)])
def test_the_requests_of_a_stage_are_as_many_as_a_bucket_counts(road: Road, stage: str, within: float):
    """But for one or two that depend on which of two tasks comes first, and for reads that fall together."""
    assert stages(road.plan)[stage]["requests"] == pytest.approx(road.requests[stage], rel=within)


def test_the_bytes_of_each_stage_are_those_that_it_leaves(road: Road):
    predicted = road.plan["bytes"]
    for name, stage in (("image shards", IMAGES), ("region shards", road.stage)):
        assert predicted[name] == pytest.approx(road.bytes(f"captions/{stage}/", ".tar"), rel=0.05)
        samples = predicted[name] - road.plan["shards"] * (1024 + 5120)  # a tar is rounded up to 10,240 bytes
        assert samples == pytest.approx(road.lengths(stage), rel=0.02)
    assert predicted["catalog"] == pytest.approx(road.bytes("captions/", ".parquet"), rel=0.1)
    assert predicted["region shards without features"] == predicted["region shards"]
    checkpoint = road.bytes(f"runs/{road.recipe.run_name}/step-0000012/", ".safetensors")
    assert predicted["checkpoint"] == pytest.approx(checkpoint, rel=0.02)
    kept = road.bytes(f"runs/{road.recipe.run_name}/", ".safetensors")
    assert predicted["checkpoints kept"] == pytest.approx(kept, rel=0.02)


# --- what decides the numbers -----------------------------------------------------------------------------------------


def test_a_sample_counts_statuses_and_bytes_of_what_really_came(tmp_path: Path):
    jpeg = encode(draw(200, 150), quality=90)
    with Web() as web:
        for n in range(6):
            web.put(f"/{n}", send(jpeg))
        web.put("/6", send(b"<html>"))
        lines = [f"a caption {n}\t{web.url(f'/{n}')}\n" for n in range(10)]  # 7, 8, 9: 404
        (tmp_path / "list.tsv").write_text("".join(lines))
        settings = ["--collect", f"download.allowed_hosts={web.host}", "--collect", "download.retries=0"]
        plan = planned(tmp_path, BASE, "--list", str(tmp_path / "list.tsv"), "--sample", "100", *settings)
        assert len(web.requests) == 10
        survival = plan["survival"]
        assert survival["statuses"] == {"ok": 6, "not_image": 1, "http_404": 3}
        assert (survival["share"], survival["image"], plan["images"]) == (0.6, len(jpeg), 6)
        assert stages(plan)["collection"]["bound"] == "the rate of the sample"
        part = planned(tmp_path, BASE, "--list", str(tmp_path / "list.tsv"), "--sample", "5", *settings)
        assert len(web.requests) == 15
        assert 0 <= part["survival"]["low"] < part["survival"]["share"] < part["survival"]["high"] <= 1


def test_a_base_pre_training_takes_the_hours_of_its_measured_step_and_loses_little_to_many_cards(tmp_path: Path):
    one = planned(tmp_path, BASE, "--rows", "3300000", "--share", "1", "data.workers=14")
    assert one["epochs"] == pytest.approx(9.7, abs=0.01)
    assert one["shards"] == 3300
    training = stages(one)["pre-training"]
    assert training["hours"] == pytest.approx(34.3, abs=0.01)
    assert training["euros"] == pytest.approx(34.3 * 2.5, rel=1e-3)
    assert one["bytes"]["checkpoint"] == pytest.approx(1.9e9, rel=0.03)  # docs/operating.md
    eight = planned(
        tmp_path, BASE, "--rows", "3300000", "--share", "1", "--cards", "8", "--price", "3", "data.workers=14"
    )
    assert stages(eight)["pre-training"]["hours"] == pytest.approx(34.3 / 8, abs=0.01)
    assert stages(eight)["pre-training"]["euros"] == pytest.approx(34.3 * 3, rel=1e-3)
    assert stages(eight)["detection"]["euros"] == pytest.approx(stages(one)["detection"]["euros"] * 3 / 2.5)
    assert stages(eight)["detection"]["hours"] == pytest.approx(stages(one)["detection"]["hours"] / 8)


def test_stored_features_are_kept_where_the_recipe_reads_them_and_loading_may_bind(tmp_path: Path):
    plan = planned(tmp_path, f"{BASE}_precomputed", "--rows", "3300000", step=0.065)
    sizes = plan["bytes"]
    assert sizes["region shards"] == sizes["region shards with features"] > sizes["region shards without features"]
    features = sizes["region shards with features"] - sizes["region shards without features"]
    assert features == pytest.approx(plan["images"] * 55 * 2 * 2048, rel=0.01)  # docs/detector.md: 2 bytes a channel
    assert stages(plan)["pre-training"]["bound"].startswith("loading, 2 workers a card")
    check = checks(plan)["loading processes a card"]
    assert not check["fits"]
    assert check["way_out"].startswith("data.workers=9")
    more = planned(tmp_path, f"{BASE}_precomputed", "--rows", "3300000", "data.workers=9", step=0.065)
    assert stages(more)["pre-training"]["bound"].startswith("the card")


@pytest.mark.parametrize(
    ("arguments", "peak", "what", "way_out"),
    [
        (["--rows", "1000"], 90e9, "GPU memory, pre-training", "data.gradient_accumulation=2"),
        (["--rows", "12000000", "--collect", "rows_per_shard=100"], 1e9, "shards of a catalog", "rows_per_shard=120"),
        (["--rows", "100000", "--collect", "rows_per_shard=50000"], 1e9, "memory for a tar", "rows_per_shard=23842"),
        (["--rows", "100000", "data.cache=/scratch", "--disk", "10"], 1e9, "disk of a machine", "data.cache_gb=9"),
        (["--rows", "10000000", "data.cache=/scratch"], 1e9, "region shards in data.cache", "data.cache_gb=1678"),
    ],
)
def test_what_does_not_fit_is_named_with_a_way_out_that_fits(
    arguments: list[str], peak: float, what: str, way_out: str, tmp_path: Path
):
    check = checks(planned(tmp_path, BASE, *arguments, peak=peak))[what]
    assert check["needed"] > check["available"]
    assert check["fits"] is False
    assert way_out in check["way_out"]
    given = ["--collect", way_out] if "rows" in way_out else [way_out]
    assert checks(planned(tmp_path, BASE, *arguments, *given, peak=peak))[what]["fits"] is True


def test_settings_decide_what_they_decide(tmp_path: Path):
    def changed(*arguments: str) -> dict:
        return planned(tmp_path, BASE, "--rows", "1000000", "data.workers=14", *arguments)

    before = changed()
    faster = changed("--collect", "download.concurrency=128")
    assert stages(faster)["collection"]["hours"] == pytest.approx(stages(before)["collection"]["hours"] / 2)
    slow = changed("--bandwidth", "1")
    assert stages(slow)["collection"]["bound"] == "bandwidth"
    assert stages(changed("data.chunk=8"))["pre-training"]["requests"] < stages(before)["pre-training"]["requests"] / 7
    cached = stages(changed("data.cache=/scratch", "data.cache_gb=1000"))["pre-training"]["requests"]
    assert cached < stages(before)["pre-training"]["requests"] / 100
    few = changed("--collect", "rows_per_shard=10000")
    assert stages(few)["detection"]["requests"] < stages(before)["detection"]["requests"]
    saved = changed("save_every=1000")["stages"][2]["requests"] - before["stages"][2]["requests"]
    assert saved > 200 * 2 * 1.9e9 / (8 << 20) / 2  # two hundred checkpoints more, in parts of 8 MiB
    assert changed("keep_checkpoints=5")["bytes"]["checkpoints kept"] == 2.5 * before["bytes"]["checkpoints kept"]
    small = changed("--collect", "download.max_side=512")["bytes"]
    assert small["image shards"] < before["bytes"]["image shards"] / 3


def test_the_page_is_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([BASE, "--rows", "3300000"], CARDS, rehearsal(MEASURED, 60.9e9))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) < 150
    assert any("62.0%" in line and "reported" in line for line in lines)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([BASE, "--list", "no-such.tsv"], "no-such.tsv cannot be read: .* --rows N"),
        ([BASE, "--list", "bad.tsv"], "bad.tsv:2: .*`caption TAB url`"),
        ([BASE, "--list", "empty.tsv"], "empty.tsv"),
        (["finetune_vqa_base", "--rows", "10"], "finetune_vqa_base is no pre-training; name one of pretrain_"),
        (["no_such", "--rows", "10"], "no such recipe"),
        ([BASE, "--rows", "0"], "--rows is 0"),
        ([BASE, "--rows", "10", "--cards", "0"], "--cards must be over 0"),
        ([BASE, "--rows", "10", "--cards", "3"], "choose a multiple of 3"),
        ([BASE, "--rows", "10", "--card", "abacus"], "--card abacus is not known; name one of h100"),
        ([BASE, "--rows", "10", "--price", "-1"], "--price is -1; give euros"),
        ([BASE, "--rows", "10", "--cpu-price", "nan"], "--cpu-price is nan"),
        ([BASE, "--rows", "10", "--share", "62"], "--share is 62"),
        ([BASE, "--rows", "10", "--regions", "101"], "--regions is 101; the detector keeps 0 to 100"),
        ([BASE, "--rows", "10", "--bandwidth", "0"], "--bandwidth"),
        ([BASE, "--rows", "10", "--image-bytes", "0"], "--image-bytes"),
        ([BASE, "--rows", "10", "--sample"], "--sample needs --list"),
        ([BASE, "--list", "gone.tsv", "--sample"], "none of 2 URLs .*2 blocked_address.*without --sample"),
        (
            [f"{BASE}_precomputed", "--rows", "10", "--detect", "keep_features=false"],
            "leave out --detect keep_features",
        ),
        ([BASE, "--rows", "10", "stepz=3"], "has no field 'stepz'"),
        ([BASE, "--rows", "10", "--collect", "rows=3"], "has no field 'rows'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_line_that_names_it(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("bad.tsv").write_text("a\thttp://example.org/a.jpg\nno tab\n")
    Path("empty.tsv").write_text("")
    Path("gone.tsv").write_text("a\thttp://127.0.0.1/a.jpg\nb\thttp://127.0.0.1/b.jpg\n")
    with pytest.raises(SystemExit, match=named) as ended:
        planned(tmp_path, *arguments)
    assert "\n" not in str(ended.value)
    assert not (tmp_path / "plan.json").exists()
