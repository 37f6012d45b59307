"""Convert the published weights of the Visual Genome detector.

    vlbert convert-detector IN OUT.safetensors [--classes objects_vocab.txt --attributes attributes_vocab.txt]

Prints what the file is, and what of it was changed. See docs/detector.md.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from detectors.names import read_names
from detectors.weights.files import write_weights
from detectors.weights.releases import convert, describe
from storage.programs import make_parser


def _names(file: Path, kind: str, count: int) -> list[str]:
    """The first names in a file of `count` lines; kind: `classes` or `attributes`. ValueError for more or fewer."""
    names = [synonyms[0] for synonyms in read_names(file)]
    if not count:
        raise ValueError(f"the weights have no {kind}: leave --{kind} out")
    if len(names) != count:
        raise ValueError(f"{file} names {len(names)} {kind}, the weights have {count}, without the background")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert convert-detector", "Convert published weights.")
    parser.add_argument("source", type=Path, metavar="IN", help="a published file: .pkl, .pth, .bin or .model")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new safetensors file")
    parser.add_argument("--classes", type=Path, help="objects_vocab.txt: the classes' names, one a line")
    parser.add_argument("--attributes", type=Path, help="attributes_vocab.txt: the attributes' names, one a line")
    options = parser.parse_args(arguments)
    try:
        if options.out.exists():
            raise ValueError(f"{options.out} is there already; give a new name")
        converted = convert(options.source)
        metadata, network = converted.metadata(), converted.network
        counts = {"classes": network.num_classes, "attributes": network.num_attributes}
        if converted.release.resnet_alone:
            counts = {"classes": 0, "attributes": 0}
        for kind, count in counts.items():
            if getattr(options, kind):
                metadata[kind] = _names(getattr(options, kind), kind, count)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        sha256 = write_weights(options.out, converted.tensors, metadata)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(describe(converted))
    for kind in counts:
        if kind not in metadata and not converted.release.resnet_alone:
            print(f"names of {kind}: none; --{kind} FILE puts them in")
    print(f"{options.out}: {len(converted.tensors)} tensors, sha256 {sha256}")


if __name__ == "__main__":
    main()
