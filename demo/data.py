"""Draw the demo data: captioned scenes, a text corpus, and pictures that RefCOCO+, VQA 2.0 and VCR ask about.

    python -m demo.data OUT --seed 0

All files are in the official formats. Colour and shape of every object are uniform and independent, and each is named
once in a caption: nothing but the picture tells them. The same settings and port give the same bytes.
"""

import argparse
import dataclasses
import io
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from demo.scenes import COLOURS, SHAPES, Scene, caption_scene, choose, draw_scene, place, task_appearances
from demo.sentences import caption, document, expression
from demo.task_files import (
    REFCOCO_NAMES,
    SPLITS,
    TaskPicture,
    refcoco_files,
    task_image_name,
    vcr_files,
    vcr_names,
    vqa_files,
    vqa_names,
)

DATA_VERSION = 3  # raise it whenever the same settings would give other bytes
DEFAULT_PORT = 8791
ROWS_PER_SHARD = 100  # of the demo's datasets; a duplicate is one only in the shard of its original

CATEGORIES = tuple(sorted(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES))  # COCO id: position + 1
WORDS_OF_THE_PICTURE = tuple(sorted([*COLOURS, *SHAPES]))

# What may be wrong with a row of train.tsv: all but "duplicate" are folders below /broken, acted out by demo/serve.py.
BROKEN_KINDS = ("404", "dropped", "html", "truncated", "slow", "bomb", "private-redirect", "duplicate")

FIRST_TASK_IMAGE = 500_000  # image ids never meet those of the caption scenes
# As in RefCOCO+, where testA asks for people and testB for everything else, the two ask for different categories.
SPLIT_SHAPES = {
    "train": SHAPES,
    "val": SHAPES,
    "testA": ("circle", "square", "triangle"),
    "testB": ("star", "cross", "ring"),
}

# One stream of random numbers per part of the data, so that a change to one leaves the others as they were.
_CAPTION_STREAM, _TEXT_STREAM, _BROKEN_STREAM, _TASK_STREAM, _VQA_STREAM, _VCR_STREAM = range(6)


@dataclass(frozen=True)
class DemoDataSettings:
    """Everything that decides what is drawn; the port only stands in the URLs."""

    seed: int = 0  # of all random choices
    width: int = 224  # of every picture, pixels
    height: int = 168  # of every picture, pixels
    train_scenes: int = 800  # captioned pictures to learn from
    held_out_scenes: int = 300  # captioned pictures to measure on
    max_objects: int = 3  # objects in a captioned picture: 1 to this many
    broken_rows: int = 40  # further rows of train.tsv that must not become samples, all kinds in turn
    text_lines: int = 2000  # lines of text.txt
    task_train: int = 400  # pictures that the tasks ask about, to learn from
    task_held_out: int = 100  # such pictures in each of val, testA and testB
    task_refs: int = 2  # objects of such a picture that an expression of RefCOCO+ means, at most; one expression each
    task_min_objects: int = 3  # objects in such a picture, at least
    task_max_objects: int = 5  # objects in such a picture, at most
    jpeg_quality: int = 90  # 1 to 95

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; it cannot be negative")
        if self.width < 112 or self.height < 112:
            raise ValueError(f"pictures of {self.width}x{self.height} pixels are too small; give at least 112x112")
        if self.train_scenes < 1:
            raise ValueError("train_scenes is 0; at least one captioned picture is needed")
        if not 1 <= self.jpeg_quality <= 95:
            raise ValueError(f"jpeg_quality is {self.jpeg_quality}; give 1 to 95")
        # Objects that soon find a place, and that words.py can count, with one more in the text corpus.
        room = min(self.width * self.height // 5000, 8)
        if not 1 <= self.max_objects <= room:
            raise ValueError(f"max_objects is {self.max_objects}; pictures of this size hold 1 to {room}")
        if not 2 <= self.task_min_objects <= self.task_max_objects <= room:
            raise ValueError(
                f"a picture of the tasks would hold {self.task_min_objects} to {self.task_max_objects} objects; "
                f"give two numbers in order from 2 to {room}"
            )

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.width, self.height

    @property
    def task_pictures(self) -> list[tuple[int, str]]:
        """Number and split of each picture that the tasks ask about."""
        sizes = dict.fromkeys(SPLITS, self.task_held_out) | {"train": self.task_train}
        return list(enumerate((split for split in SPLITS for _ in range(sizes[split])), FIRST_TASK_IMAGE))


@dataclass(frozen=True)
class DemoData:
    """Where the files of the demo data are."""

    root: Path
    settings: DemoDataSettings
    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def about(self) -> Path:
        return self.root / "demo.json"

    @property
    def train_tsv(self) -> Path:
        return self.root / "train.tsv"

    @property
    def held_out_tsv(self) -> Path:
        return self.root / "held_out.tsv"

    @property
    def text(self) -> Path:
        return self.root / "text.txt"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def annotations(self) -> Path:
        return self.root / "annotations.json"

    @property
    def task_images(self) -> Path:
        """The pictures that all three tasks ask about; like COCO's, they may lie anywhere."""
        return self.root / "coco"

    @property
    def refcoco(self) -> Path:
        return self.root / "refcoco+"

    @property
    def refcoco_refs(self) -> Path:
        return self.refcoco / REFCOCO_NAMES[0]

    @property
    def refcoco_instances(self) -> Path:
        return self.refcoco / REFCOCO_NAMES[1]

    @property
    def vqa(self) -> Path:
        return self.root / "vqa"

    @property
    def vcr(self) -> Path:
        return self.root / "vcr"

    @property
    def words_of_the_picture(self) -> list[str]:
        """The colour and shape words, sorted: those that only the picture tells."""
        return list(WORDS_OF_THE_PICTURE)

    def files(self) -> list[Path]:
        """Every file, demo.json last."""
        scenes = range(self.settings.train_scenes + self.settings.held_out_scenes)
        pictures = self.settings.task_pictures
        return [
            self.train_tsv,
            self.held_out_tsv,
            self.text,
            self.annotations,
            *(self.images / image_name(number) for number in scenes),
            *(self.task_images / task_image_name(*picture) for picture in pictures),
            *(self.refcoco / name for name in REFCOCO_NAMES),
            *(self.vqa / name for name in vqa_names()),
            *(self.vcr / name for name in vcr_names(pictures)),
            self.about,
        ]


def image_name(number: int) -> str:
    return f"{number:06d}.jpg"


def jpeg(picture: np.ndarray, quality: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=quality, subsampling=0)  # whole colour: objects are small
    return file.getvalue()


def coco_file() -> dict:
    """An empty COCO detection file with our categories; `draw_into` fills it."""
    categories = [
        {"supercategory": name.split()[1], "id": number, "name": name} for number, name in enumerate(CATEGORIES, 1)
    ]
    about = {"description": "Drawn scenes of coloured shapes", "version": str(DATA_VERSION)}
    return {"info": about, "licenses": [], "images": [], "annotations": [], "categories": categories}


def draw_into(
    coco: dict, folder: Path, number: int, scene: Scene, rng: np.random.Generator, quality: int, name: str = ""
) -> list[dict]:
    """Draw `scene` as image `number` into `folder`, add it to `coco` and return its annotations, in object order."""
    picture, visible = draw_scene(rng, scene)
    name = name or image_name(number)
    (folder / name).write_bytes(jpeg(picture, quality))
    coco["images"].append({"id": number, "file_name": name, "width": scene.width, "height": scene.height})
    annotations = []
    for thing, mask in zip(scene.objects, visible, strict=True):
        columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
        left, top = float(columns[0]), float(rows[0])
        appearance = thing.appearance
        annotations.append(
            {
                "id": len(coco["annotations"]) + len(annotations) + 1,
                "image_id": number,
                "category_id": CATEGORIES.index(appearance.category) + 1,
                "bbox": [left, top, float(columns[-1]) + 1 - left, float(rows[-1]) + 1 - top],
                "area": float(mask.sum()),
                "iscrowd": 0,
                "segmentation": [],
                # Beyond COCO: what Visual Genome calls attributes.
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
    """images/, annotations.json, train.tsv and held_out.tsv."""
    settings = data.settings
    data.images.mkdir(parents=True, exist_ok=True)
    coco = coco_file()
    for number, scene, _, rng in captioned_scenes(settings):
        draw_into(coco, data.images, number, scene, rng, settings.jpeg_quality)
    data.annotations.write_text(json.dumps(coco))
    write_caption_lists(data)


def captioned_scenes(settings: DemoDataSettings) -> Iterator[tuple[int, Scene, str, np.random.Generator]]:
    """Number, scene, caption and the generator to draw it with, of the train scenes and then of those held out."""
    for number in range(settings.train_scenes + settings.held_out_scenes):
        rng = np.random.default_rng([settings.seed, _CAPTION_STREAM, number])
        scene = caption_scene(rng, int(rng.integers(1, settings.max_objects + 1)), settings.size)
        yield number, scene, caption(rng, scene), rng


def write_caption_lists(data: DemoData) -> None:
    """train.tsv, with the broken rows strewn in, and held_out.tsv: caption TAB url.

    A "duplicate" is a copy of a good row of the same shard of ROWS_PER_SHARD rows, or of any where that shard has none.
    """
    settings = data.settings
    rows = [f"{words}\t{data.base_url}/images/{image_name(n)}\n" for n, _, words, _ in captioned_scenes(settings)]
    train, held_out = rows[: settings.train_scenes], rows[settings.train_scenes :]
    rng = np.random.default_rng([settings.seed, _BROKEN_STREAM])
    places = rng.permutation(len(train) + settings.broken_rows)[: settings.broken_rows].tolist()
    good = dict(zip(sorted(set(range(len(train) + len(places))) - set(places)), train, strict=True))  # by place
    listed = dict(good)
    for i, place_of_row in enumerate(places):
        kind = BROKEN_KINDS[i % len(BROKEN_KINDS)]
        if kind == "duplicate":
            beside = [row for n, row in good.items() if n // ROWS_PER_SHARD == place_of_row // ROWS_PER_SHARD]
            listed[place_of_row] = choose(rng, beside or list(good.values()))
        else:
            words = caption(rng, caption_scene(rng, int(rng.integers(1, settings.max_objects + 1)), settings.size))
            name = f"{len(rows) + i:06d}.{'png' if kind == 'bomb' else 'jpg'}"
            listed[place_of_row] = f"{words}\t{data.base_url}/broken/{kind}/{name}\n"
    data.train_tsv.write_text("".join(listed[n] for n in range(len(listed))))
    data.held_out_tsv.write_text("".join(held_out))


def draw_tasks(data: DemoData) -> None:
    """coco/ with the pictures, and what refcoco+/, vqa/ and vcr/ say and ask about them."""
    settings = data.settings
    data.task_images.mkdir(parents=True, exist_ok=True)
    coco, pictures = coco_file(), []
    for picture, (number, split) in enumerate(settings.task_pictures):
        rng = np.random.default_rng([settings.seed, _TASK_STREAM, picture])
        eligible = []
        while not eligible:
            objects = int(rng.integers(settings.task_min_objects, settings.task_max_objects + 1))
            appearances = task_appearances(rng, objects)
            eligible = [i for i, appearance in enumerate(appearances) if appearance.shape in SPLIT_SHAPES[split]]
        targets = [eligible[i] for i in rng.permutation(len(eligible))[: settings.task_refs]]
        expressions = {target: expression(rng, appearances, target) for target in targets}
        scene, name = place(rng, appearances, settings.size), task_image_name(number, split)
        annotations = draw_into(coco, data.task_images, number, scene, rng, settings.jpeg_quality, name)
        pictures.append(TaskPicture(number, split, scene, annotations, expressions))
    for folder, files in (
        (data.refcoco, refcoco_files(coco, pictures)),
        (data.vqa, vqa_files(pictures, (settings.seed, _VQA_STREAM))),
        (data.vcr, vcr_files(pictures, (settings.seed, _VCR_STREAM))),
    ):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def write_text(data: DemoData) -> None:
    rng = np.random.default_rng([data.settings.seed, _TEXT_STREAM])
    lines = [
        document(rng, data.settings.max_objects, data.settings.size) + "\n" for _ in range(data.settings.text_lines)
    ]
    data.text.write_text("".join(lines))


def write_about(data: DemoData) -> None:
    about = {
        "version": DATA_VERSION,
        "settings": dataclasses.asdict(data.settings),
        "port": data.port,
        "base_url": data.base_url,
        "words_of_the_picture": data.words_of_the_picture,
    }
    partial = data.about.with_suffix(".partial")
    partial.write_text(json.dumps(about, indent=2) + "\n")
    partial.replace(data.about)


def command(data: DemoData, port: int | str) -> str:
    """What draws the data for `port`, as one types it."""
    fields = [
        (field.name, getattr(data.settings, field.name), field.default) for field in dataclasses.fields(data.settings)
    ]
    given = [f"--{name.replace('_', '-')} {value}" for name, value, default in fields if value != default]
    return " ".join(["python -m demo.data", shlex.quote(str(data.root)), *given, f"--port {port}"])


def read_demo_data(out: Path) -> DemoData:
    """The data that was drawn into `out`. ValueError where there is none, or one of another version."""
    file = Path(out) / "demo.json"
    if not file.exists():
        raise ValueError(f"{out} holds no demo data (no demo.json); draw them: python -m demo.data {out}")
    about = json.loads(file.read_text())
    if about.get("version") != DATA_VERSION:
        raise ValueError(
            f"{file} is of version {about.get('version')}, this code draws {DATA_VERSION}; remove the folder {out} "
            "and draw again"
        )
    return DemoData(Path(out), DemoDataSettings(**about["settings"]), about["port"])


def is_drawn(data: DemoData) -> bool:
    """Whether `data` lie in their folder, with these settings, this port and all files."""
    return data.about.exists() and read_demo_data(data.root) == data and all(file.exists() for file in data.files())


def draw_demo_data(out: Path, settings: DemoDataSettings, port: int = DEFAULT_PORT) -> DemoData:
    """Draw demo data into the folder `out`, or leave them alone if they are there already, with all their files.

    Data of other settings are replaced: their files are removed first. With another port, only the lists of URLs
    are written again. demo.json is written last: an interrupted drawing has none, and is done again.
    """
    data = DemoData(Path(out), settings, port)
    if is_drawn(data):
        return data
    old = read_demo_data(data.root) if data.about.exists() else None
    if old is not None:
        data.about.unlink()
    if old is not None and old.settings == settings and all(file.exists() for file in data.files()[:-1]):
        write_caption_lists(data)
    else:
        for file in old.files() if old is not None else []:
            file.unlink(missing_ok=True)
        draw_captioned(data)
        write_text(data)
        draw_tasks(data)
    write_about(data)
    return data


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.data", description="Draw the demo data.")
    parser.add_argument("out", type=Path, help="the folder to draw it into")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="of the server that its URLs name (%(default)s)")
    for field in dataclasses.fields(DemoDataSettings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, help="(%(default)s)")
    chosen = vars(parser.parse_args(arguments))
    out, port = chosen.pop("out"), chosen.pop("port")
    try:
        data = DemoData(out, DemoDataSettings(**chosen), port)
        if is_drawn(data):
            print(f"{out} already holds these data; nothing drawn")
            return
        start = time.perf_counter()
        draw_demo_data(out, data.settings, port)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"drew {len(data.files())} files into {out} in {time.perf_counter() - start:.1f} s, for {data.base_url}")


if __name__ == "__main__":
    main()
