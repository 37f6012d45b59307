"""The captioned scenes of the demo data, as a dataset to collect."""

from pathlib import Path

from demo.data import DemoData
from storage.collect.fetch import DownloadSettings
from storage.collect.plan import CollectSettings


def captioned_scenes(
    demo_data: DemoData, file: Path | None = None, kind: type[CollectSettings] = CollectSettings, **changes: object
) -> CollectSettings:
    """In shards of 10 rows, two a task; `file` takes the place of their list."""
    settings = {
        "captions": str(file or demo_data.train_tsv),
        "download": DownloadSettings(deadline=1.5, retries=0, allowed_hosts=(f"127.0.0.1:{demo_data.port}",)),
        "rows_per_shard": 10,
        "shards_per_task": 2,
    }
    return kind("captions", **(settings | changes))
