"""A dataset for programs: Croissant, the JSON-LD of MLCommons, from manifests and snapshots."""

import hashlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from storage.catalog import Catalog
from storage.inventory import Inventory
from storage.object_store import ObjectStore
from storage.snapshots import read_snapshot

CONFORMS = "http://mlcommons.org/croissant/1.0"
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_COLUMNS = {  # of a snapshot, docs/formats.md
    "key": ("sc:Text", "key of the sample: the name of its members in a tar"),
    "url": ("sc:URL", "source of the image"),
    "width": ("sc:Integer", "pixels of the stored image"),
    "height": ("sc:Integer", "pixels of the stored image"),
    "num_regions": ("sc:Integer", "regions that the detector found"),
    "license": ("sc:Text", "licence of the image, as the list says"),
}


_MEMBERS = (  # of the tars: name of the set, suffix, kind, words
    ("images", "jpg", "image/jpeg", "the images"),
    ("annotations", "json", "application/json", "caption, URL and size of each image"),
)


def croissant(store: ObjectStore, dataset: str, description: str) -> dict[str, Any]:
    """The content of croissant.json: the newest snapshot of the last stage that has one, and its tars; else the tars of
    all shards.

    Where a shard of the snapshot was revised since, it is that of a new one, which is written. File names are
    relative to the dataset's folder. ValueError where nothing of the dataset is committed.
    """
    inventory, catalog = Inventory(store, dataset), Catalog(store, dataset)
    stages = sorted(stage for _, stage in inventory.manifests)
    stage = next((one for one in reversed(stages) if inventory.newest(dataset, one)), stages[-1])
    folder, newest = f"{stage}/", inventory.newest(dataset, stage)
    if newest:
        path = f"{dataset}/{stage}/snapshots/{newest}.parquet"
        snapshot, shards = read_snapshot(store, path)
        if not set(snapshot.manifests) <= set(catalog.newest(stage).values()):
            path = f"{dataset}/{stage}/snapshots/{catalog.pin(stage).id}.parquet"
            snapshot, shards = read_snapshot(store, path)
        held = [(one["tar"], one["tar_sha256"], one["tar_bytes"]) for one in shards if one["tar"]]
    else:
        headers = catalog.headers(stage).values()
        held = [(PurePosixPath(one.tar).name, one.tar_sha256, one.tar_bytes) for one in headers if one.tar]
    tars = [_file_object(tar, folder + tar, "application/x-tar", sha256, size) for tar, sha256, size in held]
    inside = [{"@id": tar["@id"]} for tar in tars]
    sets = [
        {
            "@type": "cr:FileSet",
            "@id": name,
            "name": name,
            "description": words,
            "containedIn": inside,
            "encodingFormat": kind,
            "includes": f"*.{suffix}",
        }
        for name, suffix, kind, words in _MEMBERS
    ]
    found, records = [], []
    if newest:
        data, name = store.get(path), f"snapshot-{snapshot.id}"
        sha256 = hashlib.sha256(data).hexdigest()
        found = [_file_object(name, path.removeprefix(f"{dataset}/"), "application/x-parquet", sha256, len(data))]
        records = [_record_set(name, [n for n in _COLUMNS if n != "num_regions" or stage != "images"])]
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS,
        "name": dataset,
        "description": description,
        "distribution": [*found, *tars, *sets],
        "recordSet": records,
    }


def _file_object(name: str, path: str, kind: str, sha256: str, size: int) -> dict[str, Any]:
    values = {"@type": "cr:FileObject", "@id": name, "name": name, "contentUrl": path, "encodingFormat": kind}
    return values | {"sha256": sha256, "contentSize": f"{size} B"}


def _record_set(file: str, columns: Sequence[str]) -> dict[str, Any]:
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"samples/{name}",
            "name": name,
            "description": _COLUMNS[name][1],
            "dataType": _COLUMNS[name][0],
            "source": {"fileObject": {"@id": file}, "extract": {"column": name}},
        }
        for name in columns
    ]
    values = {"@type": "cr:RecordSet", "@id": "samples", "name": "samples", "key": {"@id": "samples/key"}}
    return values | {"description": "the samples of the newest snapshot", "field": fields}
