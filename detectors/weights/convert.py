"""`vlbert convert-detector`: convert the published weights of the Visual Genome detector (docs/detector.md)."""

from pathlib import Path
from typing import Annotated

import tyro

from detectors.names import read_names
from detectors.weights.files import write_weights
from detectors.weights.releases import VLBERT, convert
from storage.programs import Command, Positional


def convert_detector(
    source: Annotated[Path, Positional, tyro.conf.arg(metavar="IN")],
    out: Annotated[Path, Positional, tyro.conf.arg(metavar="OUT")],
    classes: Path | None = None,
    attributes: Path | None = None,
) -> None:
    """Convert published weights of the Visual Genome detector.

    Args:
        source: published file: .pkl, .pth, .bin or .model
        out: new safetensors file
        classes: objects_vocab.txt, with the name of a class on each line
        attributes: attributes_vocab.txt, with the name of an attribute on each line
    """
    if out.exists():
        raise ValueError(f"{out} already exists; give a new name")
    tensors, metadata = convert(source)
    has_heads = metadata["release"] != VLBERT.name
    counts = {kind: metadata["network"][f"num_{kind}"] * has_heads for kind in ("classes", "attributes")}
    for kind, file in {"classes": classes, "attributes": attributes}.items():
        if file:
            names, count = [synonyms[0] for synonyms in read_names(file)], counts[kind]
            if len(names) != count:
                raise ValueError(
                    f"{file} names {len(names)} {kind}, but the weights have {count}, without the background"
                )
            metadata[kind] = names
    out.parent.mkdir(parents=True, exist_ok=True)
    sha256 = write_weights(out, tensors, metadata)
    heads = f"{counts['classes']} classes, {counts['attributes']} attributes, anchors {metadata.get('anchors', 'none')}"
    print(f"release {metadata['release']}: {heads}\n{out}: {len(tensors)} tensors, sha256 {sha256}")


main = Command("vlbert convert-detector", convert_detector)
