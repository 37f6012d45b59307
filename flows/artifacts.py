"""What a stage shows in the flow UI: one artifact, which grows.

It is for people; what is done stands in the storage. So nothing here may fail a stage: where the server is away, that
is logged, and work goes on.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow.compute as pc
from prefect import get_run_logger
from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from flows.prefect_patches import not_waiting
from storage.catalog import Catalog
from storage.manifests import OK
from storage.tables import markdown

STAGE_LOG = "stage"  # the last part of the name that a log line of a stage has in Prefect
_SECONDS, _SHARE = 10.0, 0.02  # between two changes of an artifact, at least; and of the time that has passed
_LONGEST = 200  # characters of an example that a table shows


def stage_logger() -> logging.LoggerAdapter:
    """Return the logger of this flow or task run for what the stage itself reports; Prefect's own have other names."""
    return get_run_logger().getChild(STAGE_LOG)


class Artifact:
    """An artifact of this flow run, made at the first `show` and changed by the later ones.

    A change costs the server an event with all that is shown, so there are about 350 in two days.
    """

    def __init__(self, stage: str, name: str):
        self.key = re.sub(r"[^a-z0-9]+", "-", f"{stage}-{name}".lower()).strip("-")  # as Prefect takes keys
        self.description = f"{stage}: {name}"
        self.started = self.due = time.monotonic()
        self.id = None

    def show(self, content: Callable[[], str], now: bool = False) -> None:
        """Show the Markdown that `content` returns in place of what was shown before, if that is due or `now`."""
        if time.monotonic() < self.due and not now:
            return
        with reporting():  # also of what it reads for that
            shown = content()
            if self.id is None:
                made = MarkdownArtifact(key=self.key, description=self.description, markdown=shown)
                self.id = made.create(_sync=True).id
            else:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self.id, ArtifactUpdate(data=shown))
        passed = time.monotonic() - self.started
        self.due = self.started + passed + max(_SECONDS, passed * _SHARE)


@contextmanager
def reporting() -> Iterator[None]:
    """Log whatever goes wrong in the block, and no more; a server that is away is not waited for."""
    try:
        with not_waiting():
            yield
    except Exception as error:  # noqa: BLE001  of the server, the network, the client: none of them is the stage's
        get_run_logger().warning("the flow UI was not updated: %s: %s", type(error).__name__, error)


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of_counts(catalog: Catalog, stage: str) -> str:
    """Return the rows of a stage by status and, of each that is not ok, an example of its details."""
    counts, headers = Counter(), catalog.headers(stage)
    for header in headers.values():
        counts.update(header.statuses)
    rows = [(escaped(status), f"{count:,}") for status, count in counts.most_common()]
    where = escaped(catalog.store.uri(f"{catalog.dataset}/{stage}"))
    table = markdown(("status", "rows"), rows)
    examples = examples_of(catalog, stage, {status for status in counts if status != OK})
    # A list, because a cell of a table does not break its lines: what is long would be out of sight.
    lines = [f"- **{escaped(status)}**: {escaped(detail[:_LONGEST])}" for status, detail in examples.items() if detail]
    return f"{counts.total():,} rows in {len(headers):,} shards of {where}\n\n{table}\n\n" + "\n".join(lines)


def examples_of(catalog: Catalog, stage: str, statuses: set[str]) -> dict[str, str]:
    """Return the first detail of each status; reads manifests until each has one."""
    found = {}
    for table in catalog.columns(stage, ["status", "detail"]) if statuses else ():
        for row in table.filter(pc.not_equal(table["status"], OK)).to_pylist():
            found.setdefault(row["status"], row["detail"])
        if found.keys() >= statuses:
            break
    return found


def table_of_metrics(metrics: Mapping[str, float | None], reported: Mapping[str, str]) -> str:
    """Return metrics beside the paper's (`reported`); not those of parts of a split (accuracy/yes/no), which are many.

    Empty if there are none.
    """
    rows = [
        (escaped(name), "–" if value is None else f"{value:.3f}", escaped(reported.get(name, "")))
        for name, value in metrics.items()
        if "/" not in name
    ]
    return markdown(("metric", "value", "the paper, %"), rows) if rows else ""


def escaped(text: str) -> str:
    """Return text from the web on one line, with no character left that means anything in Markdown or HTML."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split()))
