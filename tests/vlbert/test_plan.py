"""The plan of a pre-training: what decides its numbers, and what is refused."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from captioned import captioned_scenes
from web import Web, draw, encode, send

from demo.data import DemoData
from demo.deployments import SHIPPED_DETECTOR, make_detection_config
from detectors.run import detect_pending, make_detector, stage_of
from storage.catalog import Catalog
from storage.collect.run import IMAGES, collect
from storage.object_store import open_store
from vlbert.plan import main

BASE = "pretrain_vlbert"


def planned(*arguments: str) -> dict:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([*arguments, "--json"])
    plan = json.loads(printed.getvalue())
    return plan | {one["name"]: one for one in plan["stages"]}


@pytest.mark.slow
def test_a_sample_of_the_whole_list_gives_the_images_and_about_the_bytes_of_the_real_stages(
    demo_data: DemoData, tmp_path: Path
):
    settings, detection = captioned_scenes(demo_data), make_detection_config(SHIPPED_DETECTOR)
    host = settings.download.allowed_hosts[0]
    collect(str(tmp_path / "root"), settings, log=lambda line: None)
    catalog = Catalog(open_store(str(tmp_path / "root")), settings.name)
    detector = make_detector(detection)
    detect_pending(catalog, detector)
    headers = {stage: catalog.headers(stage).values() for stage in (IMAGES, stage_of(detector))}
    found = [
        count
        for table in catalog.columns(stage_of(detector), ["num_regions"])
        for count in table["num_regions"].to_pylist()
        if count is not None
    ]
    plan = planned(
        *("pretrain_vlbert", "--size=demo", "--list", str(settings.captions), "--sample", "100000"),
        *(f"--download.allowed_hosts={host}", "--detector.preset=demo"),
        *("--regions", str(sum(found) / len(found))),
    )
    assert plan["images"] == sum(header.ok_rows for header in headers[IMAGES])
    for name, stage in (("collect", IMAGES), ("detect", stage_of(detector))):
        tars = sum(header.tar_bytes for header in headers[stage])
        assert plan[name]["bytes"] == pytest.approx(tars, rel=0.1)


def test_hours_hold_for_the_settings_that_are_given():
    plan = planned(BASE, "--rows", "3300000", "--cards", "2")
    assert plan["pre-train"]["hours"] == pytest.approx(125_000 * 256 / 259 / 2 / 3600, rel=0.01)
    assert plan["pre-train"]["euros"] == pytest.approx(2 * 2.5 * plan["pre-train"]["hours"])
    cpu = ("--detector.device=cpu", "--detector.precision=fp32")
    slow = planned(BASE, "--rows", "3300000", *cpu)
    assert slow["detect"]["hours"] / 24 == pytest.approx(0.62 * 3_300_000 * 13.4 / 86_400, rel=0.01)
    curve = planned(BASE, "--rows", "3300000", "--keep_every", "50000")  # five checkpoints besides the newest two
    assert curve["pre-train"]["bytes"] == pytest.approx(plan["pre-train"]["bytes"] * 7 / 2)
    unknown = planned(BASE, "--rows", "9", "--activation_checkpointing", "--detector.preset=demo")
    assert unknown["pre-train"]["hours"] is unknown["detect"]["euros"] is None
    assert "benchmarks.rehearsal" in unknown["pre-train"]["source"]


def test_the_page_has_every_stage_and_the_source_of_its_numbers(web: Web, tmp_path: Path, capsys):
    file = tmp_path / "list.tsv"
    urls = [web.put("/a.jpg", send(encode(draw()))), web.put("/b.jpg", send(b"", 404))]
    file.write_text("".join(f"a caption\t{url}\n" for url in urls))
    main([BASE, "--list", str(file), "--sample=9", f"--download.allowed_hosts={web.host}"])
    printed = capsys.readouterr().out
    assert "1 images: 50.0% of the rows, a sample of 2 URLs" in printed
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["collect", "detect", "pre-train"]
    assert len(printed.splitlines()) < 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([BASE, "--list", "no-such.tsv"], "no-such.tsv"),
        (["finetune_vqa", "--rows", "10"], "finetune_vqa_base does not pre-train; give one of pretrain_"),
        ([BASE, "--rows", "10", "--cards", "3"], "choose a multiple of 3"),
        ([BASE, "--rows", "10", "--sample=9"], "--sample needs --list"),
        ([BASE, "--list", "gone.tsv", "--sample=9"], "none of 2 URLs .*2 blocked_address.*without --sample"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_line_that_names_it(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("gone.tsv").write_text("a\thttp://127.0.0.1/a.jpg\nb\thttp://127.0.0.1/b.jpg\n")
    with pytest.raises(SystemExit, match=named) as ended:
        planned(*arguments)
    assert "\n" not in str(ended.value)
