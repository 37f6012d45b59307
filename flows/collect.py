"""Collect: a caption list, or a folder of images, becomes committed shards of the stage `images`.

Shard 00000 holds the first `rows_per_shard` rows of the list, 00001 the next ones, and so on. What is committed is not
asked for again. A list may grow: its new rows make new shards. A list that changed under its committed shards is an
error, for it would mix two lists in one dataset.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from flows.artifacts import publish, table_of_counts
from flows.settings import Dataset
from storage.catalog import Catalog
from storage.download import (
    Download,
    ImageSettings,
    commit_images,
    count_captions,
    download_async,
    import_images,
    read_captions,
)
from storage.objects import open_objects

IMAGES = "images"
_SHARDS_AT_ONCE = 3  # of one task: while a slow server keeps one shard waiting, the others go on
_SUFFIXES = {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp"}


@dataclass(frozen=True)
class Part:
    """One shard to be: rows [start, stop) of the list, and what they are (file and sha256 of those rows)."""

    shard: str
    start: int
    stop: int
    source: str


@dataclass(frozen=True)
class Collected:
    """What a dataset's images are now, and how many shards this run added; counts are rows by status."""

    dataset: str
    shards: int
    new_shards: int
    counts: dict[str, int]
    seconds: float


def collect(
    root: str,
    dataset: Dataset,
    say: Callable[[str], None] = print,
    run_group: Callable[[str, Dataset, Sequence[Part]], dict[str, int]] | None = None,
) -> Collected:
    """Download or import what is missing of `dataset`; `run_group` may wrap `collect_group`, as the flow does."""
    started = time.monotonic()
    run_group = run_group or collect_group
    catalog = Catalog(open_objects(root), dataset.name)
    done = {shard: catalog.manifest(IMAGES, shard).meta for shard in catalog.shards(IMAGES)}
    parts = plan(dataset, {shard: meta["source"]["rows"][1] for shard, meta in done.items()})
    check_committed(done, parts, dataset)
    missing = [part for part in parts if part.shard not in done]
    origin = dataset.captions or dataset.images
    if missing:
        say(f"{dataset.name}: {len(missing)} of {len(parts)} shards to collect, {parts[-1].stop} rows in {origin}")
    else:
        say(f"{dataset.name}: nothing to download: {len(done)} of {len(parts)} shards are committed")
    for first in range(0, len(missing), dataset.shards_per_task):
        group = missing[first : first + dataset.shards_per_task]
        counts = run_group(root, dataset, group)
        by_status = ", ".join(f"{count} {status}" for status, count in Counter(counts).most_common())
        say(f"{dataset.name}: {first + len(group)} of {len(missing)} shards collected: {by_status}")
    counts = catalog.counts(IMAGES)
    return Collected(dataset.name, len(parts), len(missing), counts, time.monotonic() - started)


def plan(dataset: Dataset, stops: Mapping[str, int]) -> list[Part]:
    """The shards that the dataset's list makes, in order; `stops` says where committed ones end, by shard.

    ValueError where it is empty, makes more than 100,000 or has a line that is no row (FILE:LINE).
    """
    if dataset.captions:
        count_captions(Path(dataset.captions))  # every line is looked at before the first image is asked for
    parts = []
    for start, chunk in _chunks(dataset, stops):
        digest = hashlib.sha256(b"\n".join(chunk)).hexdigest()
        source = f"{Path(dataset.captions or dataset.images).name} sha256:{digest}"
        parts.append(Part(f"{len(parts):05}", start, start + len(chunk), source))
    if not parts:
        raise ValueError(f"{dataset.captions or dataset.images} holds nothing to collect for {dataset.name}")
    if len(parts) > 100_000:
        raise ValueError(f"{dataset.name} would make {len(parts)} shards, more than 100000: raise rows_per_shard")
    return parts


def _chunks(dataset: Dataset, stops: Mapping[str, int]) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first row, what identifies each row) by shard."""
    with contextlib.closing(_rows(dataset)) as rows:
        start = 0
        for number in itertools.count():
            stop = stops.get(f"{number:05}", start + dataset.rows_per_shard)
            chunk = list(itertools.islice(rows, max(0, stop - start)))
            if not chunk:
                return
            yield start, chunk
            start += len(chunk)


def _rows(dataset: Dataset) -> Iterator[bytes]:
    """What identifies each row: the line of the list; of an image its name and size, not its pixels."""
    if dataset.captions:
        with open(dataset.captions, "rb") as lines:
            for line in lines:
                yield line.removesuffix(b"\n")  # which the last line gets only when the list grows
    else:
        for file in image_files(dataset.images):
            yield f"{file.name}\t{file.stat().st_size}".encode()


def image_files(folder: str) -> list[Path]:
    """The image files of a folder, by name; ValueError where it is none."""
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder of images")
    return sorted(file for file in Path(folder).iterdir() if file.suffix.lower() in _SUFFIXES)


def check_committed(done: Mapping[str, dict], parts: Sequence[Part], dataset: Dataset) -> None:
    """ValueError where a committed shard (its meta, by shard) has other rows, or other image settings, than now."""
    expected = {part.shard: part for part in parts}
    wanted = {field.name: getattr(dataset.download, field.name) for field in dataclasses.fields(ImageSettings)}
    for shard, meta in done.items():
        rows, digest = meta["source"]["rows"], meta["source"]["list"].rpartition(" ")[2]
        part = expected.get(shard)
        if part is None or [part.start, part.stop] != rows or part.source.rpartition(" ")[2] != digest:
            now = f"rows {part.start} to {part.stop} of {part.source}" if part else f"only {len(parts)} shards"
            raise ValueError(
                f"{dataset.name}: the list changed under committed shards: shard {shard} holds rows {rows[0]} to "
                f"{rows[1]} of {meta['source']['list']}, now it would be {now}. Collect the new list as another "
                "dataset, or set the old list and rows_per_shard again"
            )
        if meta["config"] != wanted:
            differing = [
                f"{k} {meta['config'].get(k)}, now {v}" for k, v in wanted.items() if meta["config"].get(k) != v
            ]
            raise ValueError(
                f"{dataset.name}: shard {shard} was collected with other image settings: {'; '.join(differing)}. "
                "Set them back, or collect another dataset"
            )


def collect_group(root: str, dataset: Dataset, parts: Sequence[Part]) -> dict[str, int]:
    """Collect these shards, a few at a time, and commit each when it is whole; rows by status."""
    catalog = Catalog(open_objects(root), dataset.name)
    done = set(catalog.shards(IMAGES))  # by an attempt before this one, or by somebody else
    missing = [part for part in parts if part.shard not in done]
    counts: Counter[str] = Counter()

    def commit(part: Part, downloads: list[Download]) -> None:
        commit_images(catalog, part.shard, downloads, dataset.download, source=part.source)
        counts.update(item.status for item in downloads)

    if dataset.captions:
        asyncio.run(_download(missing, dataset, commit))
    else:
        files = image_files(dataset.images)
        for part in missing:
            commit(part, _import(files, part, dataset))
    return dict(counts)


async def _download(parts: Sequence[Part], dataset: Dataset, commit: Callable[[Part, list[Download]], None]) -> None:
    free = asyncio.Semaphore(_SHARDS_AT_ONCE)
    with ThreadPoolExecutor(1, thread_name_prefix="commit") as committer:  # writing must not stop the others' clocks

        async def one(part: Part) -> None:
            async with free:
                rows = read_captions(Path(dataset.captions), part.start, part.stop)
                downloads = await download_async(rows, dataset.download)
                await asyncio.get_running_loop().run_in_executor(committer, commit, part, downloads)

        tasks = [asyncio.ensure_future(one(part)) for part in parts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for pending in tasks:
                pending.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _import(files: Sequence[Path], part: Part, dataset: Dataset) -> list[Download]:
    """Each image as if it had been downloaded, its row its place among all files."""
    imported = import_images(files[part.start : part.stop], dataset.download)
    return [
        dataclasses.replace(item, row=dataclasses.replace(item.row, row=part.start + item.row.row)) for item in imported
    ]


# --- Prefect ----------------------------------------------------------------------------------------------------------


def network_failed(_task: Task, _run: TaskRun, state: State) -> bool:
    """Whether trying again can help: the storage was out of reach. A list with a broken line stays broken."""
    try:
        state.result()
    except OSError as error:
        return isinstance(error, ConnectionError | TimeoutError)
    except Exception:  # noqa: BLE001  only asked for what kind it is; Prefect raises it
        return False
    return False


@task(
    name="collect-shards",
    task_run_name="{dataset.name} from {parts[0].shard}",
    retries=3,
    retry_delay_seconds=exponential_backoff(10),
    retry_condition_fn=network_failed,
    cache_policy=NO_CACHE,
)
def collect_shards(root: str, dataset: Dataset, parts: Sequence[Part]) -> dict[str, int]:
    return collect_group(root, dataset, parts)


@flow(name="collect-captions", flow_run_name="{dataset.name}")
def collect_flow(root: str, dataset: Dataset) -> Collected:
    """Download or import the images of one dataset."""
    collected = collect(root, dataset, get_run_logger().info, collect_shards)
    publish("images", dataset.name, table_of_counts(Catalog(open_objects(root), dataset.name), IMAGES))
    return collected
