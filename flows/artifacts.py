"""What a stage leaves in the flow UI: small markdown tables."""

import re
from collections import Counter
from collections.abc import Mapping

import pyarrow.compute as pc
from prefect.artifacts import create_markdown_artifact

from storage.catalog import OK, Catalog

_REASONS = 10  # commonest ones that a table shows


def table_of_counts(catalog: Catalog, stage: str) -> str:
    """Rows of a stage by status, and the commonest reasons of those that are not ok."""
    counts, reasons, shards = Counter(), Counter(), catalog.shards(stage)
    for shard in shards:
        manifest = catalog.manifest(stage, shard)
        counts.update(manifest.statuses)
        bad = manifest.table.filter(pc.not_equal(manifest.table["status"], OK))
        reasons.update(zip(bad["status"].to_pylist(), bad["detail"].to_pylist(), strict=True))
    lines = [
        f"{counts.total()} rows in {len(shards)} shards: `{catalog.objects.where(f'{catalog.dataset}/{stage}')}`",
        *["", "| status | rows |", "|---|---:|"],
        *(f"| {status} | {count} |" for status, count in counts.most_common()),
    ]
    if reasons:
        lines += ["", "| commonest reasons | rows |", "|---|---:|"]
        lines += [f"| {_cell(f'{s}: {d}')} | {count} |" for (s, d), count in reasons.most_common(_REASONS)]
    return "\n".join(lines)


def table_of_metrics(metrics: Mapping[str, float], note: str) -> str:
    """The numbers of a last validation."""
    lines = [note, "", "| metric | value |", "|---|---:|"]
    return "\n".join(lines + [f"| {name} | {value:.3f} |" for name, value in metrics.items()])


def publish(stage: str, name: str, markdown: str) -> None:
    """Show `markdown` beside the flow run and on the artifacts page, as the latest of its key."""
    key = re.sub(r"[^a-z0-9]+", "-", f"{stage}-{name}".lower()).strip("-")
    create_markdown_artifact(markdown, key=key, description=f"{stage}: {name}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:200]
