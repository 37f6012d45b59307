"""RefCOCO+'s files over a few samples."""

import json
import pickle
from pathlib import Path

from vlbert.data.vocabulary import SPECIALS, Vocabulary

WORDS = Vocabulary([*SPECIALS, "the", "left", "right", "one"])


def write_refcoco(folder: Path, samples: list, scale: int = 1) -> None:
    """refs(unc).p and instances.json on tiny samples, whose shipped images are `scale` times as large as the stored."""
    images, annotations, refs = [], [], []
    for i, sample in enumerate(samples):
        name = Path(sample.url).name
        images.append({"id": i, "file_name": name, "width": sample.width * scale, "height": sample.height * scale})
        for box in sample.regions.boxes * scale:
            x1, y1, x2, y2 = map(float, box)
            annotations.append({"id": len(annotations), "image_id": i, "bbox": [x1, y1, x2 - x1, y2 - y1]})
        split = "train" if i % 2 else "val"
        sentences = [{"sent_id": 10 * i + k, "sent": "the left one"} for k in range(2)]
        ref = {"ref_id": i, "image_id": i, "ann_id": len(annotations) - 1}
        refs.append(ref | {"split": split, "sentences": sentences})
    folder.mkdir(exist_ok=True)
    (folder / "instances.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    (folder / "refs(unc).p").write_bytes(pickle.dumps(refs, protocol=0))


def change(folder: Path, name: str, entry: int, **fields: object) -> None:
    file = folder / "instances.json"
    instances = json.loads(file.read_text())
    instances[name][entry] |= fields
    file.write_text(json.dumps(instances))


def change_refs(folder: Path, change: object) -> None:
    file = folder / "refs(unc).p"
    refs = pickle.loads(file.read_bytes())
    change(refs)
    file.write_bytes(pickle.dumps(refs, protocol=0))
