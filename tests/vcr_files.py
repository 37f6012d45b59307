"""VCR's files over a few samples."""

import json
from pathlib import Path

import numpy as np
from tiny import SIZE

from vlbert.data.vocabulary import SPECIALS, Vocabulary
from vlbert.tasks.vcr_text import PEOPLE

OBJECTS = ["person", "dog", "person", "cup"]
BOXES = [[0, 0, 20, 40], [30, 10, 50, 30], [60, 0, 80, 60], [40, 40, 48, 48]]  # in the pixels of the stored image
ITEM = {
    "objects": OBJECTS,
    "question": ["Why", "is", [0, 1], "holding", [3], "?"],
    "answer_choices": [["no"], [[2], "is", "nearby"], ["the", [1]], [[0]]],
    "answer_label": 2,
    "rationale_choices": [["because", [1], "is", "nearby"], ["no"], ["no", "no"], ["because"]],
    "rationale_label": 0,
}
ORDINARY = ["why", "is", "hold", "##ing", "?", "the", "and", "person", "dog", "cup", "because", "near", "##by", "no"]
WORDS = Vocabulary([*SPECIALS, *ORDINARY, *PEOPLE])


def write_vcr(folder: Path, samples: list, scale: float = 1, **changes: object) -> None:
    """train.jsonl on all samples but the last and val.jsonl on the last, with metadata of images `scale` as large."""
    lines = []
    for i, sample in enumerate(samples):
        name = f"movie/{Path(sample.url).stem}"
        boxes = (np.array(BOXES) * scale).tolist()
        triangles = [[[[x1, y1], [x2, y1], [x1, y2]]] for x1, y1, x2, y2 in boxes]
        metadata = {"names": OBJECTS, "boxes": [[*box, 0.9] for box in boxes], "segms": triangles}
        metadata |= {"width": int(SIZE[0] * scale), "height": int(SIZE[1] * scale)}
        file = folder / "vcr1images" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(metadata))
        ids = {"annot_id": f"a-{i}", "img_fn": f"{name}.jpg", "metadata_fn": f"{name}.json"}
        lines.append(json.dumps(ITEM | ids | changes) + "\n")
    (folder / "train.jsonl").write_text("".join(lines[:-1]))
    (folder / "val.jsonl").write_text(lines[-1])
