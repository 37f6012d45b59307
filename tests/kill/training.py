"""Trainings that are killed and go on: real torchrun, real SIGKILL, held against one that nobody stopped.

A small VL-BERT is trained on drawn samples while a shard is committed that enters at an epoch boundary. It is killed at
random steps, one rank alone or torchrun with all of them, and goes on with another number of loading processes. In the
same world everything must be equal to the bit: losses, validations, weights, optimizer. Where the world
changes, samples and masks must be, and every sample must come exactly once an epoch. `python -m tests.kill` runs it at
full length.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from storage.object_store import open_store
from storage.runs import read_state
from tests.tiny import commit_more, tiny_recipe, tiny_root, tiny_sample
from training.distributed import World
from training.program import run_in_world
from vlbert.config import Recipe
from vlbert.data.batch import Batch
from vlbert.train import train

PROJECT = Path(__file__).parents[2]
FIRST, MORE, HELD_OUT = 44, 16, 6  # samples at the beginning, committed on the way, held out
BATCH, STEPS, SAVE_EVERY = 12, 24, 3  # of 2, 3, 4 and 1 processes; an epoch of 44 ends in the middle of a step
COMMITS_AT = 4  # step in which the other shard is committed: behind the first checkpoint, before the boundary
WAIT = 120.0  # seconds for a training to come to the step at which it is to be killed, or to its end
RUN = "training"
CLOCKED = ("samples_per_second", "data_wait", "memory_gb")  # of a line of metrics.jsonl
Say = Callable[[str], None]


# --- a rank ----------------------------------------------------------------------------------------------------------


def recipe(root: Path, workers: int) -> Recipe:
    """With all that a random generator could spoil: masks, mirrors, dropout."""
    data = {"batch": BATCH, "text_batch": BATCH, "flip": 0.5, "workers": workers, "new_shards_every": 4}
    return tiny_recipe(root, data, run_name=RUN, steps=STEPS, validate_every=5, save_every=SAVE_EVERY)


def trained(root: Path, seen: Path, workers: int) -> None:
    """Train, as each rank does, and write down what every step is computed from, before it is."""

    def work(world: World) -> None:
        seen.mkdir(parents=True, exist_ok=True)
        (seen / f"{world.rank}.pid").write_text(str(os.getpid()))

        def observe(step: int, parts: Sequence[Batch]) -> None:
            if step == COMMITS_AT and world.first:
                commit_more(root, "00090", range(FIRST, FIRST + MORE))
            line = {"step": step, "samples": [sample for part in parts for sample in sample_digests(part)]}
            with open(seen / f"{world.rank}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

        train(recipe(root, workers), world, observe)

    run_in_world("killed_training", work)


def sample_digests(batch: Batch) -> Iterator[tuple[str, str]]:
    """Yield (key, digest of all that it became without its padding) of each sample of a batch, in order."""
    counts = batch.sizes.labelled
    answers = iter(batch.labels["words"].split(counts["word_label_mask"]))
    answered = iter((batch.labelled["word_label_mask"] % batch.tokens.shape[1]).split(counts["word_label_mask"]))
    classes = iter(batch.labels["region_classes"].split(counts["region_label_mask"]))
    for row, key in enumerate(batch.keys):
        words, regions, image = batch.text_mask[row], batch.region_mask[row], int(batch.image_of[row])
        parts = [batch.tokens[row][words], next(answered), next(answers)]
        parts += [batch.boxes[row][regions], batch.region_masked[row][regions], next(classes)]
        parts += [batch.image(image)] if image >= 0 else []
        yield key, hashlib.sha256(repr([part.tolist() for part in parts]).encode()).hexdigest()[:16]


# --- the harness ------------------------------------------------------------------------------------------------------


class Attempt:
    """One torchrun of a training: started, perhaps killed, and what its ranks saw."""

    def __init__(self, root: Path, number: int, size: int, workers: int):
        self.size, self.folder = size, root / "seen" / f"{number}-of-{size}"
        self.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command += ["-m", "tests.kill", "--rank-of", str(root), str(self.folder), str(workers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
        with open(self.folder / "log.txt", "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def step(self) -> int:
        """The last step that every rank began; -1 before the first."""
        return min((steps[-1]["step"] if steps else -1 for steps in map(self.seen, range(self.size))), default=-1)

    def seen(self, rank: int) -> list[dict]:
        """What a rank wrote down, without a line that is half written."""
        file = self.folder / f"{rank}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_until(self, came: Callable[[], object], otherwise: str, pause: float = 0.01) -> None:
        end = time.monotonic() + WAIT
        while not came():
            if self.process.poll() is not None or time.monotonic() > end:
                raise self.fault(otherwise)
            time.sleep(pause)

    def begin(self, step: int) -> None:
        """Wait until every rank has begun this step."""
        self.wait_until(lambda: self.step() >= step, f"was to be ended in step {step}")

    def kill(self, rank: int | None) -> None:
        """Kill a rank, or torchrun and all ranks; torchrun must end the ranks that are left and itself."""
        if rank is None:
            self.process.kill()
        for file in self.folder.glob("*.pid" if rank is None else f"{rank}.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        self.ended()

    def ended(self) -> int:
        """Wait for its end and return its status."""
        try:
            return self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            raise self.fault(f"no end, {WAIT:g} s long") from None

    def finish(self) -> "Attempt":
        """Wait for its end, which must be a good one."""
        if code := self.ended():
            raise self.fault(f"ended with {code}")
        return self

    def fault(self, what: str) -> AssertionError:
        """Return what was wrong; no process is left."""
        if self.process.poll() is None:
            self.kill(None)
        last_words = (self.folder / "log.txt").read_text(errors="replace")[-2000:]
        return AssertionError(f"{self.folder}: {what}, came to step {self.step()}: {last_words}")


def run_killed(root: Path, worlds: Sequence[int], draw: random.Random, say: Say) -> list[Attempt]:
    """Train in these worlds, one after the other, killed at a random step in each but the last."""
    attempts = []
    for size, step in zip(worlds, [*sorted(draw.sample(range(1, STEPS - 1), len(worlds) - 1)), None], strict=True):
        workers = (1, 0, 2)[len(attempts) % 3]
        attempt = Attempt(root, len(attempts), size, workers)
        attempts.append(attempt)
        if step is None:
            attempt.finish()
            continue
        rank = draw.choice([None, draw.randrange(size)])
        attempt.begin(step)
        if rank is None and step < STEPS - SAVE_EVERY:  # in the next save; without a pause, for it takes milliseconds
            before = half_written(root)
            attempt.wait_until(lambda: half_written(root) - before, "was to be killed in a save", 0)  # noqa: B023
        else:
            time.sleep(draw.uniform(0, 0.1))
        attempt.kill(rank)
        half = f", half written: {', '.join(half_written(root))}" if rank is None else ""
        who = "torchrun and all ranks" if rank is None else f"rank {rank}"
        say(f"{root.parent.name}: {size} processes, {workers} workers: {who} killed in step {attempt.step()}{half}")
    return attempts


def half_written(root: Path) -> set[str]:
    """Return the checkpoints that are not whole, of which some file is there, under its name or not yet."""
    folders = (root / "runs" / RUN).glob("step-*")
    return {folder.name for folder in folders if not (folder / "state.json").exists() and any(folder.iterdir())}


def in_order(attempt: Attempt) -> dict[int, list[tuple[str, str]]]:
    """Return by step the samples of all ranks, in the order of their slots, images before text."""
    steps: dict[int, list] = {}
    for rank in range(attempt.size):
        for line in attempt.seen(rank):
            steps.setdefault(line["step"], []).extend(tuple(sample) for sample in line["samples"])
    whole = {step: rows for step, rows in steps.items() if len(rows) == 2 * BATCH}  # without what a kill cut short
    return {step: sorted(rows, key=lambda row: row[0].startswith("text-")) for step, rows in whole.items()}


def check_samples(reference: Attempt, attempts: Sequence[Attempt]) -> None:
    """AssertionError where a step took other samples, or made others of them, than in the training that nobody
    stopped."""
    expected, met = in_order(reference), set()
    for attempt in attempts:
        for step, rows in in_order(attempt).items():
            met.add(step)
            assert rows == expected[step], f"{attempt.folder}: step {step} has other samples, or other masks"
    assert met == expected.keys(), f"{attempts[0].folder.parent}: steps {expected.keys() - met} are missing"


def check_epochs(root: Path, training: Attempt) -> None:
    """AssertionError where a sample does not come exactly once in an epoch."""
    rows = in_order(training)
    keys = [key for step in sorted(rows) for key, _ in rows[step] if not key.startswith("text-")]
    spans = json.loads((last_checkpoint(root) / "state.json").read_text())["data"][0]["snapshots"]
    assert [span["examples"] for span in spans] == [FIRST, FIRST + MORE], f"the new shard did not enter: {spans}"
    for span, end in zip(spans, [*(s["consumed"] for s in spans[1:]), len(keys)], strict=True):
        n = span["examples"]
        everything = sorted(tiny_sample(number, regions=1 + number % 3).key for number in range(n))
        for start in range(span["consumed"], end - n + 1, n):
            assert sorted(keys[start : start + n]) == everything, f"not every sample once from {start} on"


def last_checkpoint(root: Path) -> Path:
    return root / "runs" / RUN / f"step-{STEPS:07d}"


def unequal(before: Path, after: Path, last: int = STEPS) -> list[str]:
    """Return which files of two runs, whose last step this is, differ, though they should be equal to the bit."""

    def found(run: Path) -> dict[str, object]:
        """Their contents, without what a clock says or names the root or the run."""
        checkpoint = f"runs/{run.name}/step-{last:07d}"
        state = read_state(open_store(str(run.parents[1]), write=False), checkpoint)
        del state["files"]["config.json"]
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {
            "checkpoint": state,  # with the hashes of its files
            "predictions.jsonl": (run / "predictions.jsonl").read_bytes(),
            "metrics.jsonl": [{k: v for k, v in line.items() if k not in CLOCKED} for line in lines],
        }

    first, second = found(before), found(after)
    return [f"the {name} of {after} is not that of {before}" for name in first if first[name] != second[name]]


def check(
    folder: Path, seed: int, kills: int, say: Say, worlds: Sequence[Sequence[int]] = ((2, 3, 1), (4, 1, 2))
) -> None:
    """Train in `folder`; AssertionError tells what was wrong.

    Trains undisturbed, over each of `worlds`, killed at each change, and in one world, killed until it were `kills` in
    all.
    """
    draw, began = random.Random(seed), time.monotonic()
    left = kills - sum(len(sizes) - 1 for sizes in worlds)
    reference = tiny_root(folder / "whole", FIRST, HELD_OUT)  # a root each: the other shard must be new to all
    (whole,) = run_killed(reference, [2], draw, say)
    check_epochs(reference, whole)
    for sizes in [*worlds, *([[2] * (left + 1)] if left > 0 else [])]:
        name = "-".join(map(str, sizes))
        root = tiny_root(folder / name, FIRST, HELD_OUT)
        check_samples(whole, run_killed(root, sizes, draw, say))
        if {*sizes} == {2}:  # the same world
            assert unequal(reference / "runs" / RUN, root / "runs" / RUN) == []
        say(f"{name}: as it should be ({time.monotonic() - began:.0f} s)")


def check_stopped(folder: Path, seed: int, size: int, rank: int | None, say: Say) -> None:
    """Train in `folder` on so many processes, undisturbed and stopped by SIGTERM in a random step, sent to a rank or to
    torchrun; AssertionError tells what was wrong."""
    draw = random.Random(seed)
    whole, stopped = (tiny_root(folder / name, FIRST, HELD_OUT) for name in ("whole", "stopped"))
    first, second = Attempt(whole, 0, size, 1).finish(), Attempt(stopped, 0, size, 1)
    second.begin(draw.randrange(1, STEPS - 2))
    time.sleep(draw.uniform(0, 0.1))
    process = second.process.pid if rank is None else int((second.folder / f"{rank}.pid").read_text())
    os.kill(process, signal.SIGTERM)
    code = second.ended()
    if code == 0 or "; the next start resumes from " not in (second.folder / "log.txt").read_text():
        raise second.fault(f"ended with {code} after SIGTERM")
    say(f"{'torchrun' if rank is None else f'rank {rank}'} of {size} told to stop in step {second.step()}")
    saved = [int(file.parent.name[5:]) for file in (stopped / "runs" / RUN).glob("step-*/state.json")]
    assert max(saved, default=0) in (second.step(), second.step() + 1), saved
    check_samples(first, [second, Attempt(stopped, 1, size, 0).finish()])
    assert unequal(whole / "runs" / RUN, stopped / "runs" / RUN) == []
