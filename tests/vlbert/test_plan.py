"""The plan of a pre-training: what decides its numbers, and what is refused."""

import contextlib
import io
import json
from pathlib import Path

import pytest
from captioned import captioned_scenes

from demo.data import DemoData
from demo.deployments import SHIPPED_DETECTOR, detection_of_demo
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
    return json.loads(printed.getvalue())


def stages(plan: dict) -> dict[str, dict]:
    return {one["name"]: one for one in plan["stages"]}


@pytest.mark.slow
def test_what_the_catalog_says_of_a_list_plans_about_the_bytes_of_the_real_stages(demo_data: DemoData, tmp_path: Path):
    settings, detection = captioned_scenes(demo_data), detection_of_demo(SHIPPED_DETECTOR)
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
    images = sum(header.ok_rows for header in headers[IMAGES])
    rows = sum(sum(header.statuses.values()) for header in headers[IMAGES])
    size = sum(header.tar_bytes for header in headers[IMAGES])
    plan = planned(
        *(BASE, "--size=demo", "--detector.preset=demo", f"--rows={rows}", f"--share={images / rows}"),
        *(f"--image_bytes={size / images}", f"--regions={sum(found) / len(found)}"),
    )
    assert plan["images"] == images
    for name, stage in (("collect", IMAGES), ("detect", stage_of(detector))):
        tars = sum(header.tar_bytes for header in headers[stage])
        assert stages(plan)[name]["bytes"] == pytest.approx(tars, rel=0.1)


def test_hours_hold_for_the_settings_that_are_given():
    plan = planned(BASE, "--rows", "3300000", "--cards", "2")
    assert stages(plan)["pre-train"]["hours"] == pytest.approx(125_000 * 256 / 259 / 2 / 3600, rel=0.01)
    assert stages(plan)["pre-train"]["euros"] == pytest.approx(2 * 2.5 * stages(plan)["pre-train"]["hours"])
    cpu = ("--detector.device=cpu", "--detector.precision=fp32")
    slow = stages(planned(BASE, "--rows", "3300000", *cpu))
    assert slow["detect"]["hours"] / 24 == pytest.approx(0.62 * 3_300_000 * 13.4 / 86_400, rel=0.01)
    unknown = stages(planned(BASE, "--rows", "9", "--activation_checkpointing", "--detector.preset=demo"))
    assert unknown["pre-train"]["hours"] is unknown["detect"]["euros"] is None
    assert "benchmarks.rehearsal" in unknown["pre-train"]["source"]


def test_the_page_has_every_stage_and_the_source_of_its_numbers(capsys):
    main([BASE, "--rows=1000", "--share=0.5"])
    printed = capsys.readouterr().out
    assert "500 images: 50.0% of the rows, as given" in printed
    assert "90,000 bytes an image: CC3M" in printed
    assert [line.split()[0] for line in printed.splitlines()[-3:]] == ["collect", "detect", "pre-train"]
    assert len(printed.splitlines()) < 20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["finetune_vqa", "--rows", "10"], "finetune_vqa_base is no pre-training; name one of pretrain_"),
        ([BASE, "--rows", "10", "--cards", "3"], "choose a multiple of 3"),
        ([BASE, "--rows", "10", "--share=62"], "share"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_ends_with_one_line_that_names_it(arguments: list[str], named: str):
    with pytest.raises(SystemExit, match=named) as ended:
        planned(*arguments)
    assert "\n" not in str(ended.value)
