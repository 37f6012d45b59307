"""What a stage leaves in the flow UI: small markdown tables."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping

import pyarrow.compute as pc
from prefect.artifacts import create_markdown_artifact

from storage.catalog import OK, Catalog

_LONGEST = 200  # characters of an example that a table shows


def table_of_counts(catalog: Catalog, stage: str) -> str:
    """Rows of a stage by status, each but ok with the detail of its first row."""
    counts, details, headers = Counter(), {}, catalog.headers(stage)
    for shard, header in headers.items():
        counts.update(header.statuses)
        new = header.statuses.keys() - details.keys() - {OK}
        table = catalog.manifest(stage, shard).table if new else None  # at most once a status, not once a shard
        for status in new:
            details[status] = table["detail"].filter(pc.equal(table["status"], status))[0].as_py()
    lines = [
        f"{counts.total()} rows in {len(headers)} shards: `{catalog.objects.where(f'{catalog.dataset}/{stage}')}`",
        *["", "| status | rows | for example |", "|---|---:|---|"],
        *(f"| {escaped(s)} | {count} | {escaped(details.get(s, ''))} |" for s, count in counts.most_common()),
    ]
    return "\n".join(lines)


def table_of_metrics(metrics: Mapping[str, float], note: str) -> str:
    """The numbers of a last validation."""
    lines = [note, "", "| metric | value |", "|---|---:|"]
    return "\n".join(lines + [f"| {name} | {value:.3f} |" for name, value in metrics.items()])


def publish(stage: str, name: str, markdown: str) -> None:
    """Show `markdown` beside the flow run and on the artifacts page, as the latest of its key."""
    create_markdown_artifact(markdown, key=key_of(stage, name), description=f"{stage}: {name}")


def key_of(stage: str, name: str) -> str:
    """As Prefect takes keys, small letters, digits and dashes; a name with others (refcoco+) gets its hash's start."""
    wanted = f"{stage}-{name}"
    key = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    return key if key == wanted else f"{key}-{hashlib.sha256(wanted.encode()).hexdigest()[:6]}"


def escaped(text: str) -> str:
    """Text from the web, cut, on one line, with no character left that means anything in markdown or HTML."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text[:_LONGEST].split()))
