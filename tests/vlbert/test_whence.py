"""Whence and withdraw: what is computed from a checkpoint is what the training saw."""

import contextlib
import dataclasses
import hashlib
import io
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from loaded import ALONE, captions
from refcoco_files import change_refs, write_refcoco
from tiny import DETECTOR, commit_more, commit_samples, tiny_recipe, tiny_root, tiny_sample

from storage import snapshots
from storage.catalog import Catalog
from storage.garbage import collect_garbage
from storage.object_store import open_store
from storage.sample import Sample
from vlbert.commands import main as run_command
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.datasets.files import read_lines
from vlbert.evaluation import whence, withdraw
from vlbert.evaluation.replay import ReplaySettings, replay
from vlbert.tasks.refcoco import RefCOCOSettings
from vlbert.tasks.vcr import VCRSettings
from vlbert.train import train

STAGE = f"regions/{DETECTOR}"


class Watched:
    """The steps, from 1, at which each key was in a batch; in step `at` (from 0) a shard is committed."""

    def __init__(self, root: Path, at: int | None = None):
        self.root, self.at, self.steps = root, at, defaultdict(list)

    def __call__(self, step: int, parts: Sequence[Batch]) -> None:
        if step == self.at:
            assert commit_more(self.root, "00009", range(300, 305))
        if step == 0:
            self.first = parts[0].tokens.tolist(), parts[0].labels.get("target", parts[0].tokens).tolist()
        for batch in parts:
            for key in captions(batch):
                self.steps[key].append(step + 1)


def run_of(root: Path, name: str, steps: int, **data: object) -> Recipe:
    recipe = tiny_recipe(root, run_name=name, steps=steps, save_every=2, keep_checkpoints=50)
    config = dataclasses.replace(recipe.data, held_out=None, new_shards_every=1, text_batch=0)
    return dataclasses.replace(recipe, data=dataclasses.replace(config, **data))


def drawn(count: int) -> list[Sample]:
    """The samples of a tiny root."""
    return [tiny_sample(i, regions=1 + i % 3) for i in range(count)]


def printed(program: object, *arguments: object) -> list[str]:
    """The lines that a program prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        program.main([str(one) for one in arguments])
    return text.getvalue().splitlines()


def told(checkpoint: object, image: str) -> dict[tuple[str, ...], list[int]]:
    """(run, dataset, shard, key) -> the steps that the program prints of an image."""
    found = defaultdict(list)
    for line in printed(whence, checkpoint, image):
        if match := re.fullmatch(r"(\S+): (\S+), shard (\d{5}), ([0-9a-f]{20}), steps (.+)", line):
            found[match.groups()[:4]] += map(int, match[5].split(", "))
    return dict(found)


def exported(root: Path, checkpoint: str, file: Path, *fields: str) -> dict[tuple[str, str], list[int]]:
    """(run, key) -> the steps, of the file that the program writes."""
    whence.main([f"{root}/runs/{checkpoint}", f"--out={file}", *fields])
    found = defaultdict(list)
    for row in pq.read_table(file).to_pylist():
        found[row["run"], row["key"]] += (steps := row["steps"])  # a row for each snapshot that has the sample
        assert (row["times"], row["first_step"], row["last_step"]) == (len(steps), steps[0], steps[-1])
    assert all(steps == sorted(steps) for steps in found.values())
    return dict(found)


def summary(steps: dict[str, list[int]], until: int = 10**9) -> dict[str, list[int]]:
    kept = {key: sorted(step for step in taken if step <= until) for key, taken in steps.items()}
    return {key: taken for key, taken in kept.items() if taken}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Watched]]:
    """Two weighted datasets in chunks, new shards of one of them, and a run that was stopped and resumed. Its snapshots
    have several row groups."""
    patched = pytest.MonkeyPatch()
    patched.setattr(snapshots, "_GROUP", 3)
    root = tiny_root(tmp_path_factory.mktemp("whence"), samples=13, held_out=4)
    commit_samples(root, "more", [tiny_sample(200 + i, regions=1 + i % 3) for i in range(9)])
    watched, weights = Watched(root, at=1), {"captions": 2.0, "more": 1.0}
    fields = {"datasets": weights, "chunk": 4, "held_out": ("held-out",)}
    train(run_of(root, "pretrain", 7, **fields), ALONE, watched)
    (root / "runs" / "pretrain" / "step-0000007" / "state.json").unlink()  # from step 6 on again, with more steps
    for taken in watched.steps.values():
        taken[:] = [step for step in taken if step <= 6]
    train(run_of(root, "pretrain", 12, **fields), ALONE, watched)
    yield root, watched
    patched.undo()


def read_log(root: Path, run: str, name: str) -> list[dict]:
    return [json.loads(line) for line in (root / "runs" / run / name).read_text().splitlines()]


@pytest.mark.parametrize("share", [0.3, 1e-6])
def test_a_share_by_key_is_validated_on_and_never_trained_on_and_exactly_so_in_a_resumed_run(tmp_path, capsys, share):
    """Checks two weighted datasets, one of which grows in the meantime."""
    root = tiny_root(tmp_path, samples=13, held_out=1)
    more = [tiny_sample(200 + i, regions=1 + i % 3) for i in range(9)]
    commit_samples(root, "more", more)
    keys = {sample.key for sample in drawn(13) + more}
    new = {tiny_sample(i, regions=1 + i % 3).key for i in range(300, 305)}
    held = {key for key in keys | new if int(key, 16) < share * 16**20}
    assert bool(held & new) == bool(held - new) == (share > 0.1), "the seeds of the samples give some of each"

    fields = {"datasets": {"captions": 2.0, "more": 1.0}, "held_out_share": share, "chunk": 4}
    recipe = dataclasses.replace(run_of(root, "run", 8, **fields), validate_every=4)
    watched = Watched(root, at=1)
    train(recipe, ALONE, watched)
    assert watched.steps.keys() == (keys | new) - held
    run, last = root / "runs" / "run", "step-0000008"
    validated = [row["key"] for row in read_log(root, "run", "predictions.jsonl")] if share > 0.1 else []
    assert sorted(validated) == sorted(held - new), "those of the first snapshot, so that all validations ask the same"
    printed_lines = capsys.readouterr().out
    assert (
        ("WITHOUT VALIDATION" in printed_lines.splitlines()[-1]) == ("no validation: " in printed_lines) == (not held)
    )

    files = {file.name: file.read_bytes() for file in (run / last).iterdir()}
    for step in (6, 8):
        (run / f"step-{step:07d}" / "state.json").unlink()
    train(recipe, ALONE, again := Watched(root))
    assert {file.name: file.read_bytes() for file in (run / last).iterdir()} == files
    assert {key: steps for key, taken in watched.steps.items() if (steps := [n for n in taken if n > 4])} == again.steps

    for key in keys | (new - held):
        lines = printed(whence, run, key)
        assert sum(told(run, key).values(), []) == sorted(watched.steps[key])
        assert any("used it for validation" in line for line in lines) == (key in validated)
    assert len({key for _, key in exported(root, "run", tmp_path / "all.parquet")}) == len(keys | new) - len(held)
    for step in (1, 8):
        replayed = [example.key for example in replay(str(run), step, ReplaySettings()).examples]
        assert sorted(replayed) == sorted(key for key, steps in watched.steps.items() for n in steps if n == step)


def test_every_step_of_every_sample_is_found(pretrained, tmp_path):
    root, watched = pretrained
    assert len(watched.steps) == 13 + 9 + 5
    for key, steps in watched.steps.items():
        assert sum(told(root / "runs/pretrain", key).values(), []) == sorted(steps)
    found = exported(root, "pretrain", tmp_path / "all.parquet")
    assert found == {("pretrain", key): value for key, value in summary(watched.steps).items()}
    rows = pq.read_table(tmp_path / "all.parquet").to_pylist()
    listed = [line for line in printed(whence, root / "runs/pretrain") if line.startswith("http")]
    assert listed == [f"{row['url']}: pretrain, steps {', '.join(map(str, row['steps']))}" for row in rows]
    earlier = exported(root, "pretrain/step-0000002", tmp_path / "all.parquet")
    assert earlier == {("pretrain", key): value for key, value in summary(watched.steps, 2).items()}


def finetuned(root: Path, run: str, init_from: str | None, steps: int = 5, **changes: object) -> tuple[Recipe, Watched]:
    """A RefCOCO+ training over some of the images, whose examples are phrases."""
    write_refcoco(root / "refcoco", [sample for sample in drawn(13) if len(sample.regions) > 1])
    recipe = run_of(root, run, steps, datasets={"captions": None}, batch=4)
    recipe = dataclasses.replace(
        recipe, task=RefCOCOSettings(folder=str(root / "refcoco")), init_from=init_from, **changes
    )
    return recipe, Watched(root)


def test_a_finetuning_leads_back_to_its_pretraining_even_if_that_is_gone(pretrained, tmp_path, capsys):
    root, watched = pretrained
    recipe, fine = finetuned(root, "refcoco", f"{root}/runs/pretrain")
    train(recipe, ALONE, fine)
    folder = root / "runs" / "pretrain"
    hidden = folder.rename(tmp_path / "hidden")
    try:
        both = {("refcoco", key): value for key, value in summary(fine.steps).items()}
        both |= {("pretrain", key): value for key, value in summary(watched.steps).items()}
        capsys.readouterr()
        assert exported(root, "refcoco", tmp_path / "all.parquet") == both
        first, second, _ = capsys.readouterr().out.splitlines()
        assert f"{root}/runs/refcoco/step-0000005: 5 steps of 4 examples of captions (" in first
        assert f"{root}/runs/pretrain/step-0000012: 12 steps of 8 examples of captions (18 examples), more (9" in second
        # Its snapshots stay.
        collect_garbage(open_store(str(root)), 0, delete=True)
        assert exported(root, "refcoco", tmp_path / "all.parquet") == both
    finally:
        hidden.rename(folder)
    key = next(key for key in fine.steps if len(fine.steps[key]) > 1)
    steps = {run: steps for (run, *_), steps in told(root / "runs/refcoco", key).items()}
    assert steps == {"refcoco": sorted(fine.steps[key]), "pretrain": sorted(watched.steps[key])}
    # Resumed, it still says so; and a run that starts from it leads back over both.
    train(dataclasses.replace(recipe, steps=6), ALONE, fine)
    again, third = finetuned(root, "again", f"{root}/runs/refcoco/step-0000006", steps=2)
    train(again, ALONE, third)
    assert {run for run, *_ in told(root / "runs/again", key)} >= {"refcoco", "pretrain"}
    # Without the task's files only the pre-training can be told.
    refs = (root / "refcoco").rename(tmp_path / "refs")
    with pytest.raises(SystemExit, match=r"there is no .*instances\.json"):
        whence.main([f"{root}/runs/refcoco", f"--out={tmp_path / 'none.parquet'}"])
    assert not [*tmp_path.glob("none.parquet*")], "no file that looks whole"
    refs.rename(root / "refcoco")


def swap_images(refs: list[dict]) -> None:
    """The same number of examples, two of which are about each other's image."""
    for name in ("image_id", "ann_id"):
        refs[1][name], refs[3][name] = refs[3][name], refs[1][name]


def test_a_task_whose_files_have_changed_is_named(tmp_path):
    root = tiny_root(tmp_path, samples=13, held_out=2)
    recipe, watched = finetuned(root, "one", None, steps=2, random_init=True)
    train(recipe, ALONE, watched)
    shutil.copytree(root / "refcoco", tmp_path / "before")
    change_refs(root / "refcoco", swap_images)
    changed = r"refcoco/refs\(unc\)\.p has changed since .*/runs/one/step-0000002 was trained \(sha256 "
    out = tmp_path / "all.parquet"
    with pytest.raises(SystemExit, match=changed + ".*put it back"):
        whence.main([f"{root}/runs/one", f"--out={out}"])
    with pytest.raises(ValueError, match=changed + ".*put it back, or name the folder that has it: --folder=FOLDER"):
        replay(f"{root}/runs/one", 1)
    found = replay(f"{root}/runs/one", 1, ReplaySettings(folder=str(tmp_path / "before"))).batch
    assert (found.tokens.tolist(), found.labels["target"].tolist()) == watched.first
    with pytest.raises(ValueError, match=changed + ".*put it back, or start another run: --run_name=NAME"):
        train(dataclasses.replace(recipe, steps=3), ALONE, watched)
    # What the checkpoint saw is not known for certain.
    lines = printed(withdraw, root, tiny_sample(5, regions=3).url)
    assert any(re.match(f"unknown for .*runs/one/step-0000002: .*{changed}", line) for line in lines)
    shutil.rmtree(root / "refcoco")
    (tmp_path / "before").rename(root / "refcoco")
    assert exported(root, "one", out) == {("one", key): steps for key, steps in summary(watched.steps).items()}


def test_files_that_validation_alone_reads_may_be_gone_or_change(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.jsonl").write_text(split)
    settings = VCRSettings(str(tmp_path))
    recorded = settings.hashes()
    assert recorded == {f"{split}.jsonl": hashlib.sha256(split.encode()).hexdigest() for split in ("train", "val")}
    (tmp_path / "val.jsonl").write_text("another")
    with pytest.raises(ValueError, match=r"val\.jsonl has changed since the run was .*; do this"):
        settings.check_same(recorded, "the run", "do this")
    settings.to_train().check_same(recorded, "the run", "do this")
    (tmp_path / "train.jsonl").unlink()
    settings.to_train().check_same(recorded, "the run", "do this")  # its reader says so


def test_a_copied_checkpoint_finds_the_root_that_it_is_of(tmp_path):
    root = tiny_root(tmp_path, samples=8, held_out=1)
    watched = Watched(root)
    train(run_of(root, "one", 3), ALONE, watched)
    copy = shutil.copytree(root / "runs/one/step-0000003", tmp_path / "copy")
    shutil.rmtree(root / "runs")
    key = tiny_sample(3, regions=1).key
    assert [*told(copy, key).values()] == [sorted(watched.steps[key])]
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="captions/.* is missing; put it back, or name the checkpoint in its root"):
        whence.main([str(copy), key])
    shutil.copytree(copy, tmp_path / "elsewhere/runs/one/step-0000003")
    assert told(tmp_path / "elsewhere/runs/one", key)


def test_one_url_is_told_with_dataset_shard_step_and_licence(pretrained, capsys):
    root, watched = pretrained
    sample, run = tiny_sample(200, regions=1), root / "runs/pretrain"
    expected = {("pretrain", "more", "00000", sample.key): sorted(watched.steps[sample.key])}
    assert told(run, sample.url) == told(run, sample.key) == expected
    assert "licence in its list: CC BY 4.0" in printed(whence, run, sample.url)
    assert "licence" not in "".join(printed(whence, run, tiny_sample(201, regions=2).url))
    held_out = tiny_sample(1000, regions=1)
    used = f"pretrain used it for validation (held-out, {held_out.key})"
    assert printed(whence, run, held_out.url)[1:] == [used]
    with pytest.raises(SystemExit, match="^1$"):
        whence.main([str(run), "http://example.org/another.jpg?size=3"])
    assert "another.jpg?… was not seen by these runs" in capsys.readouterr().out
    for arguments in ([str(root / "text")], [str(run), "--out=/nowhere/all.parquet"]):
        with pytest.raises(SystemExit, match="text holds no model|/nowhere/all.parquet"):
            whence.main(arguments)


# --- withdraw ---------------------------------------------------------------------------------------------------------


def test_withdrawing_lists_every_checkpoint_that_has_seen_it(tmp_path):
    root = tiny_root(tmp_path, samples=20, held_out=2)
    watched = Watched(root)
    train(run_of(root, "one", 4, new_shards_every=None), ALONE, watched)
    late = next(key for key, steps in watched.steps.items() if steps == [3])  # after the first checkpoint
    samples = {sample.key: sample for sample in drawn(20)}
    sample = samples[late]
    same = dataclasses.replace(sample, key="0" * 20, url="http://example.org/the-same-image.jpg")
    commit_samples(root, "other", [sample, same])  # a withdrawal is one of the whole root
    (tmp_path / "urls.txt").write_text(f"{sample.url}\n\nhttp://example.org/nowhere.jpg\n")
    for new in (2, 0):  # again, the same list
        lines = printed(withdraw, root, f"--urls={tmp_path / 'urls.txt'}")
        assert lines[0] == f"{new} URLs are now withdrawn, {2 - new} were already"
        assert re.fullmatch("1 of them are in no list under .*: http://example.org/nowhere.jpg", lines[1])
        assert ("1 more URLs of the same images are also withdrawn" in lines) == (new == 2)
        table = [line.split() for line in lines if line.startswith("runs/")]
        assert table == [["runs/one/step-0000004", "one", "1", "of", "3" if new else "2", "3"]]
        assert lines[-2:] == [
            f"{new} shards were rewritten without them",
            f"to delete the tars that still contain them: vlbert catalog gc {root} --delete",
        ]
    assert Catalog(open_store(str(root)), "other").manifest(STAGE, "00000").statuses == {"withdrawn": 2}
    often, steps = next((key, steps) for key, steps in watched.steps.items() if len(steps) > 1 and key != late)
    *_, line = [one for one in printed(withdraw, root, samples[often].url) if one.startswith("runs/")]
    assert line.split() == ["runs/one/step-0000004", "one", "1", "of", "1", f"{min(steps)}"]
    with pytest.raises(SystemExit, match="no URL is given"):
        withdraw.main([str(root)])
    (tmp_path / "urls.txt").write_text("\ufeffhttp://a/1\u2028.jpg\r\nhttp://a/2.jpg", encoding="utf-8", newline="")
    assert read_lines(tmp_path / "urls.txt", "--urls") == ["http://a/1\u2028.jpg", "http://a/2.jpg"]
    # A root whose name is misspelt gets no list, and is not made.
    (tmp_path / "empty").mkdir()
    for name in ("empty", "misspelt"):
        with pytest.raises(SystemExit, match=name):
            withdraw.main([str(tmp_path / name), sample.url])
    assert not (tmp_path / "misspelt").exists()
    assert not [*(tmp_path / "empty").iterdir()]


def test_a_resumed_run_leaves_a_withdrawn_sample_out_and_then_enters_a_snapshot_without_it(tmp_path, capsys):
    root = tiny_root(tmp_path, samples=16, held_out=2)
    samples, watched = drawn(16), Watched(root)
    train(run_of(root, "run", 2, batch=4), ALONE, watched)
    sample = next(sample for sample in samples if sample.key not in watched.steps)  # still to come in this epoch
    printed(withdraw, root, sample.url)
    run_command(["catalog", "gc", str(root), "--delete"])
    capsys.readouterr()
    train(run_of(root, "run", 8, batch=4), ALONE, watched)
    assert sample.key not in watched.steps
    assert "revised shards from step 5, the beginning of epoch 1: 15 examples" in capsys.readouterr().out
    (line,) = [json.loads(line) for line in (root / "runs/run/unreadable.jsonl").read_text().splitlines()]
    assert line["key"] == sample.key
    assert "was withdrawn since" in line["reason"]
    # Every other sample was there in both epochs, at the steps that whence says.
    found = exported(root, "run", tmp_path / "all.parquet")
    assert {key: value for (_, key), value in found.items() if key != sample.key} == summary(watched.steps)
    assert f"{sample.url} has been withdrawn" in printed(whence, root / "runs/run", sample.url)
    # A new run never meets it.
    new = Watched(root)
    train(run_of(root, "new", 4, batch=4), ALONE, new)
    assert new.steps.keys() == {one.key for one in samples} - {sample.key}


def test_withdrawing_beside_a_running_training_does_not_end_it(tmp_path):
    root = tiny_root(tmp_path, samples=16, held_out=2)
    samples, gone = drawn(16), []

    class Withdrawing(Watched):
        def __call__(self, step: int, parts: Sequence[Batch]) -> None:
            super().__call__(step, parts)
            if step == 0:  # one of each tar that is still to come
                for tar in (samples[:8], samples[8:]):
                    gone.append(next(sample for sample in tar if sample.key not in self.steps))
                printed(withdraw, root, *(sample.url for sample in gone))
                collect_garbage(open_store(str(root)), 0, delete=True)

    watched = Withdrawing(root)
    train(run_of(root, "run", 7, batch=4), ALONE, watched)
    left = {sample.key for sample in samples} - {sample.key for sample in gone}
    first = {key for key in left if any(step <= 4 for step in watched.steps[key])}
    second = {key for key, steps in watched.steps.items() if any(step > 4 for step in steps)}
    assert first == left, "the first epoch goes on with all others"
    assert len(second) == 12
    assert second <= left, "the next one begins with a snapshot without them"
