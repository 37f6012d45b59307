"""What a stage shows in the flow UI: its run's name and tags, and small tables that grow.

It is for people; what is done stands in the storage. So nothing here may fail a stage: where the server is away, that
is logged, and work goes on.
"""

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

import pyarrow.compute as pc
from prefect import get_run_logger
from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.exceptions import MissingContextError
from prefect.runtime import flow_run

from flows.prefect_patches import not_waiting
from flows.supervisor import ChildFailed
from storage.catalog import Catalog
from storage.manifests import OK
from storage.tables import markdown
from training.log import by_dataset

Result = TypeVar("Result")
STAGE_LOG = "stage"  # the last part of the name that a log line of a stage has in Prefect
_SECONDS = 10.0  # between two changes of an artifact, at least
_LONGEST = 200  # characters of an example that a table shows


def stage_logger() -> logging.LoggerAdapter:
    """The logger of this flow or task run for what the stage itself reports; Prefect's own lines have another name."""
    return get_run_logger().getChild(STAGE_LOG)


def name_run(name: str, *tags: str) -> None:
    """Call this flow run `name`, and give it these tags beside those that it has."""
    with reporting(), get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run.get_id())
        client.update_flow_run(run.id, name=name, tags=sorted({*run.tags, *tags}))


class Live:
    """One artifact of this flow run, made at the first `show` and changed by the later ones.

    A change costs the server an event with all that is shown, so there is one in 10 s at most and, later, in a
    hundredth (`share`) of the time that has passed: about 160 in the first half hour, 600 in two days.
    """

    def __init__(self, stage: str, name: str, share: float = 0.01):
        self.key, self.description, self.run = key_of(stage, name), f"{stage}: {name}", flow_run.get_id()
        self.share, self.started = share, time.monotonic()
        self.shown, self.id = None, None  # shown: the last attempt at it

    @property
    def due(self) -> bool:
        """Whether `show` would be in time."""
        now = time.monotonic()
        return self.shown is None or now - self.shown >= max(_SECONDS, (now - self.started) * self.share)

    def show(self, content: str) -> None:
        """Show markdown instead of what was shown before."""
        with reporting():
            if self.id is None:
                # Of the run that made this, also where a stage of that run is the first that the server hears.
                given = {"key": self.key, "description": self.description, "flow_run_id": self.run}
                self.id = MarkdownArtifact(markdown=content, **given).create(_sync=True).id
            else:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self.id, ArtifactUpdate(data=content))
        self.attempted()

    def attempted(self) -> None:
        """Have `show` due later: what is to be shown may be out of reach, too, and is not asked for at every line."""
        self.shown = time.monotonic()


class Stages:
    """The artifact of a run with stages, each a flow run of its own: their progress and their results.

    It is shown when a stage begins and ends and, as often as a Live is, when the running stage calls `show_progress`.
    """

    def __init__(self, name: str, stages: Sequence[str]):
        self.live, self.rows = Live("pipeline", name), {stage: Stage(stage) for stage in stages}
        self.show()

    def run(self, stage: str, work: Callable[[], Result], describe: Callable[[Result], str]) -> Result:
        """What `work` returns, which is done as this stage; `describe` gives the table a few words about it."""
        row = self.rows[stage]
        row.began, row.result = time.monotonic(), "running"
        self.show()
        token = _STAGES.set((self, row))
        try:
            result = work()
        except BaseException as error:
            # A signal is no Exception: the stage was cancelled, or its process is to end.
            row.end("failed" if isinstance(error, Exception) else "ended", reason_of(error))
            raise
        else:
            row.end(describe(result))
            return result
        finally:
            _STAGES.reset(token)
            self.show()

    def show(self) -> None:
        """Show all stages as they are now."""
        self.live.show(table_of_stages(list(self.rows.values())))


@dataclass
class Stage:
    """A line of the table of stages; facts are those that `show_progress` was given."""

    name: str
    result: str = ""
    run: str | None = None  # id of its flow run
    facts: Mapping[str, str] = field(default_factory=dict)
    began: float | None = None
    seconds: float | None = None
    reason: str = ""  # why it failed or ended

    def end(self, result: str, reason: str = "") -> None:
        self.result, self.reason, self.facts, self.seconds = result, reason, {}, time.monotonic() - self.began


_STAGES: ContextVar[tuple[Stages, Stage] | None] = ContextVar("stages", default=None)


def show_progress(facts: Callable[[], Mapping[str, str]] = dict) -> None:
    """Show `step`, `loss` and `time left` of this flow run on the page of the run that it is a stage of, if it is one.

    May be called often: `facts` is called only where the page is due.
    """
    stages, row = _STAGES.get() or (None, None)
    if stages and (row.run is None or stages.live.due):
        row.run = flow_run.get_id()
        with reporting():
            row.facts = facts()
            stages.show()
        stages.live.attempted()


def reason_of(error: BaseException) -> str:
    """An error in one line; of a child's, why it ended and its last words."""
    words = str(error)
    if isinstance(error, ChildFailed):
        words = ": ".join([error.reason, *error.tail[-1:]])
    return f"{type(error).__name__}: {words}".splitlines()[0]


@contextmanager
def reporting() -> Iterator[None]:
    """Whatever goes wrong in the block is logged, and no more; a server that is away is not waited for."""
    try:
        with not_waiting():
            yield
    except Exception as error:  # noqa: BLE001  of the server, the network, the client: none of them is the stage's
        try:
            logger = get_run_logger()
        except MissingContextError:  # outside any run
            logger = logging.getLogger(__name__)
        logger.warning("the flow UI was not updated: %s: %s", type(error).__name__, error)


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of_counts(catalog: Catalog, stage: str) -> str:
    """Return the rows of a stage by status, each with a share and, unless it is ok, an example of its details."""
    counts, headers = Counter(), catalog.headers(stage)
    for header in headers.values():
        counts.update(header.statuses)
    rows = [(escaped(s), f"{count:,}", f"{count / counts.total():.1%}") for s, count in counts.most_common()]
    folder = link(catalog.store.where(f"{catalog.dataset}/{stage}"))
    lines = [f"{counts.total():,} rows in {len(headers):,} shards, written to {folder}", ""]
    lines.append(markdown(("status", "rows", "share"), rows))
    examples = examples_of(catalog, stage, {status for status in counts if status != OK})
    # A list, because a cell of a table does not break its lines: what is long would be out of sight.
    lines += [f"- **{escaped(s)}**: {escaped(examples[s])}" for s, _ in counts.most_common() if examples.get(s)]
    return "\n".join(lines[:3] + [""] * (len(lines) > 3) + lines[3:])


def examples_of(catalog: Catalog, stage: str, statuses: set[str]) -> dict[str, str]:
    """Return the first detail of each status; reads manifests until each has one."""
    found = {}
    for table in catalog.columns(stage, ["status", "detail"]) if statuses else ():
        for row in table.filter(pc.not_equal(table["status"], OK)).to_pylist():
            found.setdefault(row["status"], row["detail"])
        if found.keys() >= statuses:
            break
    return found


def table_of_progress(facts: Mapping[str, object]) -> str:
    """How far a stage is: one row a fact, the first as the head."""
    head, *rows = ((name, escaped(str(value))) for name, value in facts.items())
    return markdown(head, rows)


def table_of_metrics(metrics: Mapping[str, float], checkpoint: str, paper: str = "") -> str:
    """The metrics of a last validation; paper: what the paper reports of the task, in a line."""
    # In a cell the paper's words would push the values out of sight.
    lines = [f"Checkpoint {link(checkpoint)}", *([f"**The paper, on the real data:** {escaped(paper)}"] * bool(paper))]
    parts = by_dataset(metrics)  # beside those over all examples
    rows = [
        (escaped(name), value, *(_value(part.get(name)) for part in parts.values())) for name, value in _values(metrics)
    ]
    return "\n\n".join([*lines, markdown(("metric", "value", *map(escaped, parts)), rows)])


def table_of_evaluation(
    metrics: Mapping[str, float | None], reported: Mapping[str, str], folder: str, submission: Sequence[str]
) -> str:
    """The metrics of a split, beside the paper's (`reported`), and links to its page and files for a leaderboard."""
    lines = [f"Page {link(f'{folder}/index.html')}", *(f"Submission {link(f'{folder}/{name}')}" for name in submission)]
    rows = [(escaped(name), value, escaped(reported.get(name, ""))) for name, value in _values(metrics)]
    return "\n\n".join([*lines, markdown(("metric", "value", "the paper, %"), rows)])


def _values(metrics: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Names and values; not of parts of a split (accuracy/yes/no), which are many."""
    return [(name, _value(value)) for name, value in metrics.items() if "/" not in name]


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def table_of_stages(stages: Sequence[Stage]) -> str:
    """How far each stage is, with a link to its flow run, without a host: a browser may know it by another name."""
    rows = []
    for stage in stages:
        name = f"[{_words(stage.name)}](/runs/flow-run/{stage.run})" if stage.run else escaped(stage.name)
        facts = [escaped(stage.facts.get(fact, "")) for fact in ("step", "loss", "time left")]
        seconds = time.monotonic() - stage.began if stage.seconds is None and stage.began is not None else stage.seconds
        rows.append([name, *facts, "" if seconds is None else f"{seconds:,.0f}", escaped(stage.result)])
    table = markdown(("stage", "step", "loss", "time left", "seconds", "result"), rows)
    # Reasons are long, so they stand in a list.
    reasons = [f"- **{escaped(one.name)}** {one.result}: {escaped(one.reason)}" for one in stages if one.reason]
    return "\n".join([table, *([""] * bool(reasons)), *reasons])


def publish(stage: str, name: str, content: Callable[[], str]) -> None:
    """Show what `content` gives beside the flow run and on the artifacts page, as the latest of its key."""
    with reporting():  # also of what it reads for that
        Live(stage, name).show(content())


def link(where: str) -> str:
    """A folder or file in the storage as a link that a person can copy where the browser does not follow it."""
    url = where if "://" in where else f"file://{where}"
    return f"[{_words(where)}]({quote(url, safe=':/')})"


def _words(text: str) -> str:
    """The words of a link, which the UI shows as they are, escapes too, but for what ends a link or a cell."""
    return re.sub(r"[\[\]\\|]", lambda found: quote(found[0]), text)


def key_of(stage: str, name: str) -> str:
    """As Prefect takes keys, small letters, digits and dashes; a name with others (refcoco+) gets its hash's start."""
    wanted = f"{stage}-{name}"
    key = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    return key if key == wanted else f"{key}-{hashlib.sha256(wanted.encode()).hexdigest()[:6]}"


def escaped(text: str) -> str:
    """Text from the web, cut, on one line, with no character left that means anything in markdown or HTML."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text[:_LONGEST].split()))
