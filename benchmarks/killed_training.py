"""Trainings that are killed and go on: real torchrun, real SIGKILL, held against one that nobody stopped.

A small VL-BERT is trained on drawn samples while a shard is committed that enters at an epoch boundary. It is killed at
random steps, one rank alone or torchrun with all of them, and goes on with another number of loading processes. In the
same world everything must be equal to the bit: batches, losses, validations, weights, optimizer. Where the world
changes, samples and masks must be, and every sample must come exactly once an epoch. `python -m benchmarks.kill` runs
it at full length.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.synthetic import commit_samples, drawn_sample
from detectors.resnet import ResNetConfig
from storage.object_store import open_store
from storage.runs import read_state
from storage.sample import Sample
from training.distributed import World
from training.optimizer import OptimizerConfig
from training.program import run_in_world
from vlbert.config import DataConfig, ModelConfig, Recipe, RegionConfig
from vlbert.data.batch import Batch
from vlbert.data.corpus import make_corpus
from vlbert.data.masking import RegionMasking, WordMasking
from vlbert.tasks.pretraining import PretrainingSettings
from vlbert.train import train

SIZE = (160, 120)  # width, height
FIRST, MORE, HELD_OUT = 44, 16, 6  # samples at the beginning, committed on the way, held out
BATCH, STEPS, SAVE_EVERY = 12, 24, 3  # of 2, 3, 4 and 1 processes; an epoch of 44 ends in the middle of a step
COMMITS_AT = 4  # step in which the other shard is committed: behind the first checkpoint, before the boundary
WAIT = 120.0  # seconds for a training to come to the step at which it is to be killed, or to its end
RUN = "training"
CLOCKED = ("samples_per_second", "data_wait", "save_wait", "memory_gb")  # of a line of metrics.jsonl
Say = Callable[[str], None]


# --- what is trained --------------------------------------------------------------------------------------------------


def sample_of(number: int) -> Sample:
    return drawn_sample(number, None, SIZE, regions=1 + number % 3)


def commit(root: Path, dataset: str, shard: int, numbers: range) -> None:
    """A region shard of these samples, unless it is there."""
    commit_samples(str(root), dataset, [sample_of(number) for number in numbers], numbers[0], shard)


def make_root(root: Path) -> None:
    """Shards and text for a training."""
    for shard, first in enumerate(range(0, FIRST, 16)):
        commit(root, "captions", shard, range(first, min(FIRST, first + 16)))
    commit(root, "held-out", 0, range(1000, 1000 + HELD_OUT))
    (root / "lines.txt").write_text("".join(f"{sample_of(number).caption}\n" for number in range(2000, 2030)))
    make_corpus(root / "text", [root / "lines.txt"], vocabulary=None, size=150, captions=[])


def recipe(root: Path, workers: int) -> Recipe:
    """Seconds on a CPU, with all that a random generator could spoil: masks, mirrors, dropout."""
    resnet = ResNetConfig(blocks=(1, 1, 1, 1), width=4, stem_pool="torch", res5_dilated=False)
    regions = RegionConfig(resnet=resnet, short_side=64, long_side=96, roi_size=4, frozen_stages=0, random_init=True)
    model = ModelConfig("JJ", hidden_size=32, num_heads=4, intermediate_size=64, max_positions=96, geometry_channels=32)
    return Recipe(
        name="killed",
        run=RUN,
        task=PretrainingSettings(WordMasking(probability=0.3), RegionMasking(probability=0.4), text_length=12),
        model=dataclasses.replace(model, regions=dataclasses.replace(regions, pixel_std=60.0)),
        data=DataConfig(
            root=str(root),
            held_out=("held-out",),
            batch=BATCH,
            text_batch=BATCH,
            text_corpus=str(root / "text"),
            flip=0.5,
            workers=workers,
            new_shards_every=4,
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=5),
        steps=STEPS,
        precision="fp32",
        vocabulary=str(root / "text" / "vocab.txt"),
        log_every=1,
        validate_every=5,
        save_every=SAVE_EVERY,
    )


# --- a rank ----------------------------------------------------------------------------------------------------------


def trained(root: Path, seen: Path, workers: int) -> None:
    """What each rank does: train, and write down what every step is computed from, before it is."""

    def work(world: World) -> None:
        seen.mkdir(parents=True, exist_ok=True)
        (seen / f"{world.rank}.pid").write_text(str(os.getpid()))

        def observe(step: int, parts: Sequence[Batch]) -> None:
            if step == COMMITS_AT and world.first:
                commit(root, "captions", 90, range(FIRST, FIRST + MORE))
            line = {"step": step, "batches": [batch_digest(part) for part in parts]}
            line["samples"] = [[key, *digest] for part in parts for key, *digest in sample_digests(part)]
            with open(seen / f"{world.rank}.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

        train(recipe(root, workers), world, observe)

    run_in_world("killed_training", work)


def digest(*arrays: Tensor) -> str:
    """16 hex digits over the bytes, shapes and dtypes of tensors."""
    state = hashlib.sha256()
    for array in arrays:
        array = np.ascontiguousarray(array.numpy())
        state.update(f"{array.dtype} {array.shape}".encode())
        state.update(array.tobytes())
    return state.hexdigest()[:16]


def batch_digest(batch: Batch) -> str:
    """Of all tensors of a batch, padding included."""
    values = vars(batch)
    tensors = {name: value for name, value in values.items() if hasattr(value, "numpy")}
    tensors |= {f"{of}.{name}": value for of in ("labelled", "labels") for name, value in values[of].items()}
    return digest(*(tensors[name] for name in sorted(tensors)))


def sample_digests(batch: Batch) -> Iterator[tuple[str, str]]:
    """(key, digest of all that it became without its padding) of each sample of a batch, in order."""
    counts, length = batch.sizes.labelled, batch.tokens.shape[1]
    answers = iter(batch.labels["words"].split(counts["word_label_mask"]))
    answered = iter((batch.labelled["word_label_mask"] % length).split(counts["word_label_mask"]))
    classes = iter(batch.labels["region_classes"].split(counts["region_label_mask"]))
    for row, key in enumerate(batch.keys):
        words, regions = batch.text_mask[row], batch.region_mask[row]
        parts = [batch.tokens[row][words], next(answered), next(answers)]
        parts += [batch.boxes[row][regions], batch.region_masked[row][regions], next(classes)]
        image = int(batch.image_of[row])
        if image >= 0:
            parts.append(batch.image(image))
        yield key, digest(*parts)


# --- the harness ------------------------------------------------------------------------------------------------------


class Attempt:
    """One torchrun of a training: started, perhaps killed, and what its ranks saw."""

    def __init__(self, root: Path, number: int, size: int, workers: int):
        self.size, self.folder = size, root / "seen" / f"{number}-of-{size}"
        self.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command += ["-m", "benchmarks.kill", "--rank-of", str(root), str(self.folder), str(workers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
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

    def wait(self) -> str | None:
        """To its end; what went wrong, if anything did."""
        try:
            code = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.kill(None)
            return f"{self.folder}: no end within {WAIT:g} s"
        return f"{self.folder}: ended with {code}: {self.last_words()}" if code else None

    def kill_at(self, step: int, rank: int | None, delay: float) -> str | None:
        """SIGKILL for this rank, or for torchrun and all ranks, so many seconds after `step` began."""
        problem = self.came_to(step)
        if problem:
            return problem
        time.sleep(delay)
        return self.kill(rank)

    def kill_in_save(self, root: Path, step: int) -> str | None:
        """SIGKILL for torchrun and all ranks, once the writing of a checkpoint has begun after `step` has."""
        problem = self.came_to(step)
        if problem:
            return problem
        before, end = half_written(root), time.monotonic() + WAIT
        while not half_written(root) - before:  # without a pause: it takes milliseconds
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill(None)
                return f"{self.folder}: was to be killed in a save after step {step}: {self.last_words()}"
        return self.kill(None)

    def stop_at(self, step: int, rank: int | None, delay: float) -> str | None:
        """SIGTERM for this rank, or for torchrun, so many seconds after `step` began; all must end, and say why."""
        problem = self.came_to(step)
        if problem:
            return problem
        time.sleep(delay)
        os.kill(self.process.pid if rank is None else int((self.folder / f"{rank}.pid").read_text()), signal.SIGTERM)
        try:
            code = self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.kill(None)
            return f"{self.folder}: goes on {WAIT:g} s after SIGTERM: {self.last_words()}"
        if code == 0 or "; the next start goes on from " not in (self.folder / "log.txt").read_text():
            return f"{self.folder}: ended with {code} after SIGTERM: {self.last_words()}"
        return None

    def came_to(self, step: int) -> str | None:
        """Wait for a step to begin; what went wrong, where it does not."""
        end = time.monotonic() + WAIT
        while self.step() < step:
            if self.process.poll() is not None or time.monotonic() > end:
                self.kill(None)
                return f"{self.folder}: was to be ended in step {step} and came to {self.step()}: {self.last_words()}"
            time.sleep(0.01)
        return None

    def kill(self, rank: int | None) -> str | None:
        """Now; what went wrong, where torchrun does not end the ranks that are left and itself."""
        if rank is None:
            self.process.kill()
        for file in self.folder.glob("*.pid" if rank is None else f"{rank}.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        try:
            self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            if rank is not None:
                self.kill(None)
            return f"{self.folder}: torchrun goes on {WAIT:g} s after the kill: {self.last_words()}"
        return None

    def last_words(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")[-2000:]


def run_killed(root: Path, worlds: Sequence[int], draw: random.Random, say: Say) -> tuple[list[Attempt], list[str]]:
    """A training in these worlds, one after the other, killed at a random step in each but the last."""
    attempts = []
    for size, step in zip(worlds, [*sorted(draw.sample(range(1, STEPS - 1), len(worlds) - 1)), None], strict=True):
        workers = (1, 0, 2)[len(attempts) % 3]
        attempts.append(Attempt(root, len(attempts), size, workers))
        if step is None:
            problem = attempts[-1].wait()
        else:
            rank, delay = draw.choice([None, draw.randrange(size)]), draw.uniform(0, 0.1)
            saving = rank is None and step < STEPS - SAVE_EVERY  # before the last save
            problem = attempts[-1].kill_in_save(root, step) if saving else attempts[-1].kill_at(step, rank, delay)
            said = "torchrun and all ranks" if rank is None else f"rank {rank}"
            half = f", while it saved: {', '.join(half_written(root)) or 'none'} half written" if saving else ""
            at = attempts[-1].step()
            say(f"{root.name}: {size} processes, {workers} workers each: {said} killed in step {at}{half}")
        if problem:
            return attempts, [problem]
    return attempts, []


def half_written(root: Path) -> set[str]:
    """The checkpoints that are not whole, of which some file is there, under its name or not yet."""
    folders = (root / "runs" / RUN).glob("step-*")
    return {folder.name for folder in folders if not (folder / "state.json").exists() and any(folder.iterdir())}


def in_order(attempt: Attempt) -> dict[int, list[tuple[str, str]]]:
    """By step the samples of all ranks, in the order of their slots, images before text."""
    steps: dict[int, list] = {}
    for rank in range(attempt.size):
        for line in attempt.seen(rank):
            steps.setdefault(line["step"], []).extend(tuple(sample) for sample in line["samples"])
    whole = {step: rows for step, rows in steps.items() if len(rows) == 2 * BATCH}  # without what a kill cut short
    return {step: sorted(rows, key=lambda row: row[0].startswith("text-")) for step, rows in whole.items()}


def differences(reference: Attempt, attempts: Sequence[Attempt]) -> list[str]:
    """Steps that took other samples, or made others of them, than the training that nobody stopped."""
    expected, faults, met = in_order(reference), [], set()
    for attempt in attempts:
        for step, rows in in_order(attempt).items():
            met.add(step)
            if rows != expected[step]:
                faults.append(f"{attempt.folder}: step {step} has other samples, or other masks")
        if attempt.size == reference.size:
            for rank in range(attempt.size):
                batches = {line["step"]: line["batches"] for line in reference.seen(rank)}
                faults += [
                    f"{attempt.folder}: rank {rank} has another batch in step {line['step']}"
                    for line in attempt.seen(rank)
                    if line["batches"] != batches[line["step"]]
                ]
    return faults + [f"{attempts[0].folder.parent}: step {step} is missing" for step in expected.keys() - met]


def not_once_an_epoch(root: Path, training: Attempt) -> list[str]:
    """Epochs of a training in which a sample does not come exactly once."""
    rows = in_order(training)
    keys = [key for step in sorted(rows) for key, _ in rows[step] if not key.startswith("text-")]
    spans = json.loads((last_checkpoint(root) / "state.json").read_text())["data"][0]["snapshots"]
    faults = []
    if [span["examples"] for span in spans] != [FIRST, FIRST + MORE]:
        faults.append(f"{root.name}: the shard that was committed on the way did not enter: {spans}")
    for span, end in zip(spans, [*(s["consumed"] for s in spans[1:]), len(keys)], strict=True):
        n, everything = span["examples"], {sample_of(number).key: 1 for number in range(span["examples"])}
        for number, start in enumerate(range(span["consumed"], end - n + 1, n), span["epoch"]):
            if Counter(keys[start : start + n]) != everything:
                faults.append(f"{root.name}: epoch {number} does not hold every sample once")
    return faults


def last_checkpoint(root: Path) -> Path:
    return root / "runs" / RUN / f"step-{STEPS:07d}"


def measured(root: Path) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    lines = (root / "runs" / RUN / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKED} for line in lines]


def last_state(root: Path) -> dict:
    """state.json of the last checkpoint, but for the hash of config.json, which names the root."""
    found = read_state(open_store(str(root), write=False), f"runs/{RUN}/step-{STEPS:07d}")
    del found["files"]["config.json"]
    return found


def unequal(before: Path, after: Path) -> list[str]:
    """Which files of the trainings in two roots differ, though they should be equal to the bit."""
    names = [f"step-{STEPS:07d}/{name}" for name in ("model.safetensors", "optimizer.safetensors")]
    faults = [
        f"{after.name}: its {name} is not that of {before.name}"
        for name in [*names, "predictions.jsonl"]
        if (before / "runs" / RUN / name).read_bytes() != (after / "runs" / RUN / name).read_bytes()
    ]
    if last_state(before) != last_state(after):
        faults.append(f"{after.name}: its state.json is not that of {before.name}")
    pairs = list(itertools.zip_longest(measured(before), measured(after)))
    return faults + [f"{after.name}: {b} became {a}" for b, a in pairs if b != a][:3]


def check(
    folder: Path, seed: int, kills: int, say: Say, worlds: Sequence[Sequence[int]] = ((2, 3, 1), (4, 1, 2))
) -> list[str]:
    """Train in `folder`: undisturbed, over each of `worlds`, killed at each change, and in one world, killed until it
    were `kills` in all. What was wrong, if anything.
    """
    draw, began, faults = random.Random(seed), time.monotonic(), []
    left = kills - sum(len(sizes) - 1 for sizes in worlds)
    runs = {"whole": [2]} | ({"killed": [2] * (left + 1)} if left > 0 else {})
    runs |= {"-".join(map(str, sizes)): sizes for sizes in worlds}
    for name, sizes in runs.items():
        root = folder / name  # one each: the shard that is committed on the way must be new to all
        make_root(root)
        attempts, found = run_killed(root, sizes, draw, say)
        if name == "whole":
            whole = attempts[0]
            if found:
                return found
        if not found:
            found = differences(whole, attempts)
            found += not_once_an_epoch(root, whole) if name == "whole" else []
            found += unequal(folder / "whole", root) if name == "killed" else []
        say(f"{name}: {'; '.join(found[:3]) or 'as it should be'} ({time.monotonic() - began:.0f} s)")
        faults += found
    return faults


def check_stopped(folder: Path, seed: int, size: int, rank: int | None, say: Say) -> list[str]:
    """Train in `folder` on so many processes: undisturbed, and told to stop by SIGTERM in a random step. What was
    wrong, if anything."""
    draw = random.Random(seed)
    whole, stopped = folder / "whole", folder / "stopped"
    make_root(whole)
    make_root(stopped)
    first = Attempt(whole, 0, size, 1)
    problem = first.wait()
    if problem:
        return [problem]
    second = Attempt(stopped, 0, size, 1)
    problem = second.stop_at(draw.randrange(1, STEPS - 2), rank, draw.uniform(0, 0.1))
    say(f"{'torchrun' if rank is None else f'rank {rank}'} of {size} told to stop in step {second.step()}")
    saved = [int(file.parent.name[5:]) for file in (stopped / "runs" / RUN).glob("step-*/state.json")]
    if not problem and max(saved, default=0) not in (second.step(), second.step() + 1):
        problem = f"{stopped}: the last checkpoint is of step {max(saved, default=0)}"
    third = Attempt(stopped, 1, size, 0)
    problem = problem or third.wait()
    return [problem] if problem else differences(first, [second, third]) + unequal(whole, stopped)
