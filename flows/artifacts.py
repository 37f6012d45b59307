"""What a stage leaves in the flow UI: its run's name and tags, small markdown tables, curves that grow.

Prefect remembers for people; what is done stands in the storage. So nothing here may fail a stage: a server that is
away is logged, and work goes on.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run

from storage.catalog import OK, Catalog

_LONGEST = 200  # characters of an example that a table shows
_COMMONEST = 10  # reasons that a table of counts shows
_DIFFERING = r"[0-9a-fA-F]{6,}|[0-9]+"  # what differs between two details that give the same reason


def name_run(name: str, *tags: str) -> None:
    """Call this flow run `name`, and give it these tags beside those that it has."""
    with reporting(), get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run.get_id())
        client.update_flow_run(run.id, name=name, tags=sorted({*run.tags, *tags}))


class Live:
    """One artifact of this flow run, made at the first `show` and changed by the later ones.

    A change costs the server an event with all that is shown, so there is one in `seconds` at most and, later, in a
    hundredth of the time that has passed (about 160 in the first half hour, 600 in two days); of an image in a
    twentieth (about 140 in two days).
    """

    def __init__(self, stage: str, name: str, seconds: float = 10.0, image: bool = False):
        self.key, self.description = key_of(stage, name), f"{stage}: {name}"
        self.seconds, self.image, self.share = seconds, image, 0.05 if image else 0.01
        self.started, self.shown, self.id = time.monotonic(), None, None

    @property
    def due(self) -> bool:
        """Whether `show` would be in time."""
        now = time.monotonic()
        return self.shown is None or now - self.shown >= max(self.seconds, (now - self.started) * self.share)

    def show(self, content: str) -> None:
        """Show markdown, or the URL of an image, instead of what was shown before."""
        if self.image:  # Prefect's own image artifacts print the URL, too: of a data: URI, all of it
            content = f"![{self.key}]({content})"
        with reporting():
            if self.id is None:
                self.id = create_markdown_artifact(content, key=self.key, description=self.description)
            else:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self.id, ArtifactUpdate(data=content))
        self.shown = time.monotonic()


@contextmanager
def reporting() -> Iterator[None]:
    """Whatever goes wrong in the block is logged, and no more."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  of the server, the network, the client: none of them is the stage's
        try:
            logger = get_run_logger()
        except MissingContextError:  # outside any run
            logger = logging.getLogger(__name__)
        logger.warning("the flow UI was not told: %s: %s", type(error).__name__, error)


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of_counts(catalog: Catalog, stage: str) -> str:
    """Rows of a stage by status, and the ten commonest reasons why rows are not ok, each with an example."""
    counts, headers = Counter(), catalog.headers(stage)
    for header in headers.values():
        counts.update(header.statuses)
    with_failures = [shard for shard, header in headers.items() if header.ok_rows < sum(header.statuses.values())]
    lines = [
        f"{counts.total():,} rows in {len(headers):,} shards, written to "
        f"{link(catalog.objects.where(f'{catalog.dataset}/{stage}'))}",
        *["", "| status | rows | share |", "|---|---:|---:|"],
        *(f"| {escaped(s)} | {count:,} | {count / counts.total():.1%} |" for s, count in counts.most_common()),
    ]
    if with_failures:
        # A list, because a cell of a table does not break its lines: what is long would be out of sight.
        lines += ["", "The commonest reasons, each with an example:", ""]
        lines += [
            f"- **{escaped(status)}**, {rows:,} {'row' if rows == 1 else 'rows'}"
            + (example and f": {escaped(example)}")
            for status, rows, example in commonest_reasons(catalog, stage, with_failures)
        ]
    return "\n".join(lines)


def commonest_reasons(catalog: Catalog, stage: str, shards: list[str]) -> list[tuple[str, int, str]]:
    """(status, rows, the first detail) of the commonest; details that differ in numbers alone are one reason."""
    rows, examples = Counter(), {}
    for table in catalog.columns(stage, ["status", "detail"], shards):
        table = table.filter(pc.not_equal(table["status"], OK))
        reason = pc.replace_substring_regex(table["detail"], _DIFFERING, "#")
        groups = pa.table({"status": table["status"], "reason": reason, "detail": table["detail"]})
        found = groups.group_by(["status", "reason"]).aggregate([("detail", "min"), ("detail", "count")])
        for group in found.to_pylist():
            key = group["status"], group["reason"]
            rows[key] += group["detail_count"]
            examples.setdefault(key, group["detail_min"])
    return [(key[0], count, examples[key]) for key, count in rows.most_common(_COMMONEST)]


def table_of_progress(facts: Mapping[str, object]) -> str:
    """How far a stage is: one row a fact, the first as the head."""
    head, *rows = (f"| {name} | {escaped(str(value))} |" for name, value in facts.items())
    return "\n".join([head, "|---|---:|", *rows])


def table_of_metrics(
    metrics: Mapping[str, float], checkpoint: str, paper: str = "", reported: Mapping[str, str] | None = None
) -> str:
    """The numbers of a last validation, beside what the paper reports: of the task, and in % for a metric. Numbers of
    parts of a split (accuracy/yes/no) are many, and stand elsewhere."""
    lines = [f"Checkpoint {link(checkpoint)}"]
    if paper:  # above: in a cell its words would push the values out of sight
        lines += ["", f"**The paper, on the real data:** {escaped(paper)}"]
    return "\n".join([*lines, "", *_beside_the_paper(metrics, reported or {})])


def table_of_evaluation(
    metrics: Mapping[str, float | None], reported: Mapping[str, str], place: str, submission: Sequence[str]
) -> str:
    """The numbers of a split that was evaluated, with links to its page and to what a leaderboard takes."""
    lines = [f"Page {link(f'{place}/index.html')}", *(f"Submission {link(f'{place}/{name}')}" for name in submission)]
    return "\n\n".join([*lines, "\n".join(_beside_the_paper(metrics, reported))])


def _beside_the_paper(metrics: Mapping[str, float | None], reported: Mapping[str, str]) -> list[str]:
    """The lines of a table; one column more where the paper reports any of them."""
    metrics = {name: value for name, value in metrics.items() if "/" not in name}
    known = {name: reported.get(name, "") for name in metrics}
    with_paper = any(known.values())
    lines = (
        ["| metric | value | the paper, % |", "|---|---:|---|"] if with_paper else ["| metric | value |", "|---|---:|"]
    )
    for name, value in metrics.items():
        number = "–" if value is None else f"{value:.3f}"
        lines.append(f"| {escaped(name)} | {number} |" + (f" {escaped(known[name])} |" if with_paper else ""))
    return lines


def table_of_stages(stages: Sequence[tuple[str, str, float]]) -> str:
    """(stage, what it came to, seconds) of a whole road."""
    lines = ["| stage | seconds | came to |", "|---|---:|---|"]
    return "\n".join(
        lines + [f"| {escaped(name)} | {seconds:,.0f} | {escaped(what)} |" for name, what, seconds in stages]
    )


def publish(stage: str, name: str, markdown: Callable[[], str]) -> None:
    """Show what `markdown` gives beside the flow run and on the artifacts page, as the latest of its key."""
    with reporting():  # also of what it reads for that
        Live(stage, name).show(markdown())


def link(where: str) -> str:
    """A place in the storage as a link that a person can copy where the browser does not follow it."""
    url = where if "://" in where else f"file://{where}"
    text = re.sub(r"[\[\]\\]", lambda found: quote(found[0]), where)  # the UI shows all else as it is, escapes too
    return f"[{text}]({quote(url, safe=':/')})"


def key_of(stage: str, name: str) -> str:
    """As Prefect takes keys, small letters, digits and dashes; a name with others (refcoco+) gets its hash's start."""
    wanted = f"{stage}-{name}"
    key = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    return key if key == wanted else f"{key}-{hashlib.sha256(wanted.encode()).hexdigest()[:6]}"


def escaped(text: str) -> str:
    """Text from the web, cut, on one line, with no character left that means anything in markdown or HTML."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text[:_LONGEST].split()))
