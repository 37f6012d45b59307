"""Draw the demo data: captioned scenes, a text corpus, and images for RefCOCO+, VQA 2.0, VCR and retrieval.

    python -m demo.data FOLDER [--seed 1 --train_scenes 100 ...]

All files are in the official formats. Each object's colour and shape are uniform and independent, and a caption names
them once, so that they can only be known from the image. The same settings and port give the same bytes.
"""

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from PIL import Image

from demo.scenes import (
    COLOURS,
    HEIGHT,
    SHAPES,
    WIDTH,
    Scene,
    arrange,
    choose,
    draw_scene,
    draw_task_appearances,
    make_caption_scene,
)
from demo.sentences import make_caption, make_document, make_expression
from demo.task_files import (
    REFCOCO_NAMES,
    SPLITS,
    TaskImage,
    refcoco_files,
    retrieval_files,
    task_image_name,
    vcr_files,
    vqa_files,
)
from storage.programs import Command, Flat, Positional

DATA_VERSION = 6  # increase it whenever the same settings give different bytes
DEFAULT_PORT = 8791
MAX_OBJECTS = 3  # maximum number of objects in a captioned image; the minimum is 1
TASK_OBJECTS = (3, 5)  # minimum and maximum number of objects in a task image
TASK_REFS = 2  # maximum number of objects in a task image that have a RefCOCO+ expression
DESCRIPTION = "demo.json"  # written last: a folder without it is drawn again
LABELS = (60, 240, 1000)  # numbers of labelled examples of RefCOCO+ and VQA to learn from
ROWS_PER_SHARD = 100  # in the demo's datasets; a duplicate is recognised only in the same shard as its original

CATEGORIES = tuple(sorted(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES))  # COCO id: position + 1
VISUAL_WORDS = tuple(sorted([*COLOURS, *SHAPES]))  # words of a caption that can only be known from the image

# Faults that rows of train.tsv may have. All but "duplicate" are folders below /broken, simulated by demo/serve.py.
BROKEN_KINDS = ("404", "dropped", "html", "truncated", "slow", "bomb", "private-redirect", "duplicate")

FIRST_TASK_IMAGE = 500_000  # first id of task images, above the ids of all captioned images
# Each part of the data has its own random numbers, so that a change to one part does not change the others.
_CAPTION_STREAM, _TEXT_STREAM, _BROKEN_STREAM, _TASK_STREAM, _VQA_STREAM, _VCR_STREAM, _RETRIEVAL_STREAM = range(7)


@dataclass(frozen=True)
class DemoDataSettings:
    """Settings of the drawn data. The server's port is not one of them, because it only appears in URLs."""

    seed: int = 0  # seed of all random choices
    train_scenes: int = 800  # captioned images for training
    held_out_scenes: int = 300  # captioned images for validation
    broken_rows: int = 40  # additional rows of train.tsv that must not become samples; they cycle through all faults
    text_lines: int = 2000  # lines of text.txt
    task_train: int = 500  # task images for training
    task_val: int = 100  # task images for validation, which may choose a checkpoint
    task_test: int = 500  # task images for tests, which choose nothing

    @property
    def task_images(self) -> list[tuple[int, str]]:
        """Image id and split of each task image."""
        sizes = zip(SPLITS, (self.task_train, self.task_val, self.task_test), strict=True)
        return list(enumerate((split for split, size in sizes for _ in range(size)), FIRST_TASK_IMAGE))


@dataclass
class DemoData:
    """Paths of the demo data's files below `root`. The folder `coco` has the images of all four tasks."""

    root: Path
    settings: DemoDataSettings
    port: int

    def __post_init__(self) -> None:
        self.description = self.root / DESCRIPTION
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.train_tsv, self.held_out_tsv = self.root / "train.tsv", self.root / "held_out.tsv"
        self.text = self.root / "text.txt"
        self.images, self.annotations = self.root / "images", self.root / "annotations.json"
        self.task_images = self.root / "coco"
        self.refcoco, self.vqa, self.vcr = self.root / "refcoco+", self.root / "vqa", self.root / "vcr"
        self.retrieval = self.root / "retrieval"
        self.labels = self.root / "labels"
        self.refcoco_refs, self.refcoco_instances = (self.refcoco / name for name in REFCOCO_NAMES)


def image_name(number: int) -> str:
    return f"{number:06d}.jpg"


def make_coco_file() -> dict:
    """Return a COCO detection file as a dict, with the demo's categories but without images, which `draw_into` adds."""
    categories = [
        {"supercategory": name.split()[1], "id": number, "name": name} for number, name in enumerate(CATEGORIES, 1)
    ]
    info = {"description": "Drawn scenes of coloured shapes", "version": "3"}
    return {"info": info, "licenses": [], "images": [], "annotations": [], "categories": categories}


def draw_into(
    coco: dict, folder: Path, number: int, scene: Scene, rng: np.random.Generator, name: str = ""
) -> list[dict]:
    """Draw `scene` as image `number` into `folder`, and add it to `coco`. Return its annotations in object order."""
    pixels, visible = draw_scene(rng, scene)
    name = name or image_name(number)
    # No chroma subsampling, because objects are small.
    Image.fromarray(pixels).save(folder / name, "JPEG", quality=90, subsampling=0)
    coco["images"].append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT})
    annotations = []
    for obj, mask in zip(scene.objects, visible, strict=True):
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        left, top = float(columns[0]), float(rows[0])
        appearance = obj.appearance
        annotations.append(
            {
                "id": len(coco["annotations"]) + len(annotations) + 1,
                "image_id": number,
                "category_id": CATEGORIES.index(appearance.category) + 1,
                "bbox": [left, top, float(columns[-1]) + 1 - left, float(rows[-1]) + 1 - top],
                "area": float(mask.sum()),
                "iscrowd": 0,
                "segmentation": [],
                # Not in COCO: attributes in the sense of Visual Genome.
                "attributes": [
                    appearance.colour,
                    "striped" if appearance.striped else "solid",
                    "big" if appearance.big else "small",
                ],
            }
        )
    coco["annotations"] += annotations
    return annotations


def draw_captioned(data: DemoData) -> None:
    """Draw images/, and write annotations.json, train.tsv and held_out.tsv."""
    data.images.mkdir(parents=True, exist_ok=True)
    coco, captions = make_coco_file(), []
    for number in range(data.settings.train_scenes + data.settings.held_out_scenes):
        rng = np.random.default_rng([data.settings.seed, _CAPTION_STREAM, number])
        scene = make_caption_scene(rng, int(rng.integers(1, MAX_OBJECTS + 1)))
        captions.append(make_caption(rng, scene))
        draw_into(coco, data.images, number, scene, rng)
    data.annotations.write_text(json.dumps(coco))
    write_caption_lists(data, captions)


def write_caption_lists(data: DemoData, captions: Sequence[str]) -> None:
    """Write train.tsv, with the broken rows at random positions, and held_out.tsv. A line is caption TAB URL.

    A "duplicate" copies a good row of the same shard of ROWS_PER_SHARD rows, or any good row if the shard has none.
    """
    settings = data.settings
    rows = [f"{words}\t{data.base_url}/images/{image_name(number)}\n" for number, words in enumerate(captions)]
    train, held_out = rows[: settings.train_scenes], rows[settings.train_scenes :]
    rng = np.random.default_rng([settings.seed, _BROKEN_STREAM])
    broken = rng.permutation(len(train) + settings.broken_rows)[: settings.broken_rows].tolist()
    good = dict(zip(sorted(set(range(len(train) + len(broken))) - set(broken)), train, strict=True))  # by row
    listed = dict(good)
    for i, number in enumerate(broken):
        kind = BROKEN_KINDS[i % len(BROKEN_KINDS)]
        if kind == "duplicate":
            in_shard = [row for n, row in good.items() if n // ROWS_PER_SHARD == number // ROWS_PER_SHARD]
            listed[number] = choose(rng, in_shard or list(good.values()))
        else:
            words = make_caption(rng, make_caption_scene(rng, int(rng.integers(1, MAX_OBJECTS + 1))))
            name = f"{len(rows) + i:06d}.{'png' if kind == 'bomb' else 'jpg'}"
            listed[number] = f"{words}\t{data.base_url}/broken/{kind}/{name}\n"
    data.train_tsv.write_text("".join(listed[n] for n in range(len(listed))))
    data.held_out_tsv.write_text("".join(held_out))


def draw_tasks(data: DemoData) -> None:
    """Draw the task images into coco/, and write their annotations to refcoco+/, vqa/, vcr/ and retrieval/.

    labels/ has further copies of the first two, with few labels to train on.
    """
    settings = data.settings
    data.task_images.mkdir(parents=True, exist_ok=True)
    coco, images = make_coco_file(), []
    for index, (number, split) in enumerate(settings.task_images):
        rng = np.random.default_rng([settings.seed, _TASK_STREAM, index])
        objects = draw_task_appearances(rng, int(rng.integers(TASK_OBJECTS[0], TASK_OBJECTS[1] + 1)))
        targets = rng.permutation(len(objects))[:TASK_REFS].tolist()
        expressions = {target: make_expression(rng, objects, target) for target in targets}
        scene, name = arrange(rng, objects), task_image_name(number, split)
        annotations = draw_into(coco, data.task_images, number, scene, rng, name)
        images.append(TaskImage(number, split, scene, annotations, expressions))
    few = [
        (data.labels / f"{name}-{labels}", files)
        for labels in LABELS
        for name, files in (
            ("refcoco", refcoco_files(coco, images, labels)),
            ("vqa", vqa_files(images, (settings.seed, _VQA_STREAM), labels)),
        )
    ]
    for folder, files in (
        *few,
        (data.refcoco, refcoco_files(coco, images)),
        (data.vqa, vqa_files(images, (settings.seed, _VQA_STREAM))),
        (data.vcr, vcr_files(images, (settings.seed, _VCR_STREAM))),
        (data.retrieval, retrieval_files(images, (settings.seed, _RETRIEVAL_STREAM))),
    ):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def write_text(data: DemoData) -> None:
    rng = np.random.default_rng([data.settings.seed, _TEXT_STREAM])
    lines = [make_document(rng, MAX_OBJECTS) + "\n" for _ in range(data.settings.text_lines)]
    data.text.write_text("".join(lines))


def read_demo_data(folder: Path) -> DemoData:
    """Return the demo data in a folder. Raises ValueError if there is none, or if it is of another version."""
    file = Path(folder) / DESCRIPTION
    if not file.exists():
        raise ValueError(f"{folder} has no demo data (no {DESCRIPTION}); draw it with: python -m demo.data {folder}")
    description = json.loads(file.read_text())
    if description["version"] != DATA_VERSION:
        raise ValueError(f"{file} is of another version than this code draws; remove {folder}, and draw it again")
    return DemoData(Path(folder), DemoDataSettings(**description["settings"]), description["port"])


def draw_demo_data(folder: Path, settings: DemoDataSettings, port: int = DEFAULT_PORT) -> DemoData:
    """Draw demo data into the folder, unless it already has complete data with the same settings.

    Existing data keeps its port. Raises ValueError if the folder has data with other settings or of another version.
    """
    data = DemoData(Path(folder), settings, port)
    if data.description.exists():
        data = read_demo_data(folder)
        if data.settings != settings:
            raise ValueError(
                f"{folder} has demo data with other settings: {data.settings}, not {settings}; name another folder, or "
                "remove this one and everything made from it (make clean)"
            )
        return data
    with ProcessPoolExecutor(2) as pool:
        for drawn in [pool.submit(draw_tasks, data), pool.submit(draw_captioned, data)]:
            drawn.result()
    write_text(data)
    description = {"version": DATA_VERSION, "settings": dataclasses.asdict(settings), "port": port}
    data.description.write_text(json.dumps(description, indent=2) + "\n")
    return data


def draw(
    folder: Annotated[Path, Positional, tyro.conf.arg(metavar="FOLDER")],
    settings: Annotated[DemoDataSettings, Flat] = DemoDataSettings(),
    port: int = DEFAULT_PORT,
) -> None:
    """Draw the demo data.

    Args:
        folder: folder to draw into
        port: port of the image server in the URLs
    """
    print(f"{folder}: demo data for {draw_demo_data(folder, settings, port).base_url}")


main = Command("python -m demo.data", draw)

if __name__ == "__main__":
    main()
