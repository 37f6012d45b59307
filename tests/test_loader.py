"""The loader's benchmark runs, at sizes that measure nothing."""

import json
import subprocess
import sys

import pytest

BARS = {
    "  ratio": 3,
    "read, decode, resize to 600/1000, mask": 200,
    "order of 5,000 samples, chunks of 1": 1,
    "seek to a batch of 256, chunks of 1": 5,
    "index of 5,000 samples, growth of its reader": 64,
    "text corpus, order and batches of 256 x 64": 50,
}


@pytest.mark.slow
def test_every_bar_is_measured_and_the_exit_status_says_whether_all_are_met(tmp_path):
    sizes = {"samples": 64, "per-shard": 32, "images": 8, "index": 5000, "tokens": 100_000, "bucket": 192, "rounds": 1}
    command = [sys.executable, "-m", "benchmarks.loader", "--folder", tmp_path, "--json", tmp_path / "figures.json"]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = json.loads((tmp_path / "figures.json").read_text())["lines"]
    assert {line["what"]: line["bar"] for line in lines if line["bar"] is not None} == BARS
    assert all(line["what"] in done.stdout for line in lines)
    assert done.returncode == int(any(line["verdict"].startswith("FAIL") for line in lines)), done.stderr
    requests = {line["what"]: line["value"] for line in lines if line["unit"] == "requests/sample"}
    assert requests["S3, chunks of 8"] < requests["S3, chunks of 1"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["figures.json"]
