"""Show a stage's progress and results in Prefect's UI, as an artifact that is updated during the run.

Artifacts are only for people to read: the storage records what is done. So an error here never fails a stage. If the
server is unreachable, the error is logged and the stage continues.
"""

import copy
import functools
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.logging.handlers import APILogHandler
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run

from flows.prefect_patches import fail_fast
from storage.catalog import Catalog
from storage.collect.failures import first_failures
from storage.safe_json import printable
from storage.tables import markdown

STAGE_LOG = "stage"  # last part of the logger name of a stage's own log lines in Prefect
_SECONDS, _SHARE = 10.0, 0.02  # minimum time between two updates of an artifact: seconds, and share of the run time
_MAX_DETAIL = 200  # characters of an example that are shown


def stage_logger() -> logging.Logger | logging.LoggerAdapter:
    """Return a logger for a stage's own messages. Its name distinguishes them from Prefect's messages.

    In a stage of a pipeline, the messages are also sent to the log of the pipeline's run.
    """
    logger: Any = get_run_logger().getChild(STAGE_LOG)  # ty: ignore[missing-union-attribute] Prefect's adapter has it
    if not any(isinstance(handler, _PipelineHandler) for handler in logger.logger.handlers):
        logger.logger.addHandler(_PipelineHandler())
    return logger


class _PipelineHandler(APILogHandler):
    """Sends a stage's messages to the log of the flow run that started the stage, after the stage's name."""

    def emit(self, record: logging.LogRecord) -> None:
        if parent := _parent_of(flow_run.id):
            record = copy.copy(record)
            record.flow_run_id, record.task_run_id = parent, None
            record.msg, record.args = f"{flow_run.flow_name}: {record.getMessage()}", ()
            super().emit(record)


@functools.lru_cache
def _parent_of(run: str | None) -> str | None:
    """Return the id of the flow run that started the current one, which has the id `run`."""
    return run and flow_run.parent_flow_run_id


def log_reason(flow: Any, flow_run: Any, state: State) -> None:
    """Log the reason why a flow failed in one line, after Prefect's traceback. This is a hook, `on_failure`."""
    reason = str(state.result(raise_on_failure=False)).strip().splitlines()[-1:] or [state.message]
    flow_run_logger(flow_run).getChild(STAGE_LOG).error("failed: %s", printable(reason[0]).strip(" |"))


class Artifact:
    """A Markdown artifact of this flow run. The first `show` creates it, and later calls update it.

    The server stores the whole content with each update, so updates become less frequent: about 350 in two days.
    """

    def __init__(self, stage: str, name: str):
        self.key = re.sub(r"[^a-z0-9]+", "-", f"{stage}-{name}".lower()).strip("-")  # a valid key in Prefect
        self.description = f"{stage}: {name}"
        self.started = self.due = time.monotonic()
        self.id = None

    def show(self, content: Callable[[], str], now: bool = False) -> None:
        """Show the Markdown that `content` returns, if an update is due or `now` is true."""
        if time.monotonic() < self.due and not now:
            return
        with log_errors():  # `content` may fail, too
            shown = content()
            if self.id is None:
                made = MarkdownArtifact(key=self.key, description=self.description, markdown=shown)
                self.id = made.create(_sync=True).id  # ty: ignore[unknown-argument, missing-union-attribute] dispatched
            else:
                with get_client(sync_client=True) as client:
                    client.update_artifact(self.id, ArtifactUpdate(data=shown))
        passed = time.monotonic() - self.started
        self.due = self.started + passed + max(_SECONDS, passed * _SHARE)


@contextmanager
def log_errors() -> Iterator[None]:
    """Context manager that logs errors instead of raising them. Requests to an unreachable server fail in seconds."""
    try:
        with fail_fast():
            yield
    except Exception as error:  # noqa: BLE001  an error of Prefect's UI must not fail the stage
        get_run_logger().warning("Prefect's UI was not updated: %s: %s", type(error).__name__, error)


# --- tables -----------------------------------------------------------------------------------------------------------


def make_counts_table(catalog: Catalog, stage: str) -> str:
    """Return a Markdown table of a stage's row counts by status, followed by an example of each error."""
    counts, folder = Counter(catalog.counts(stage)), escape(catalog.store.uri(f"{catalog.dataset}/{stage}"))
    table = markdown(("status", "rows"), [(escape(status), f"{count:,}") for status, count in counts.most_common()])
    # A list, because table cells do not wrap: long text would be cut off.
    examples = [(failure.status, failure.reason[:_MAX_DETAIL]) for failure in first_failures(catalog, stage)]
    lines = [f"- **{escape(status)}**: {escape(reason)}" for status, reason in examples]
    return f"{counts.total():,} rows in {len(catalog.shards(stage)):,} shards of {folder}\n\n{table}\n\n" + "\n".join(
        lines
    )


def make_metrics_table(metrics: Mapping[str, float | None]) -> str:
    """Return a Markdown table of metrics, or "" if it would be empty.

    Metrics whose names contain a slash, such as accuracy/yes/no, are left out, because there are too many of them.
    """
    rows = [
        (escape(name), "–" if value is None else f"{value:.3f}") for name, value in metrics.items() if "/" not in name
    ]
    return markdown(("metric", "value"), rows) if rows else ""


def escape(text: str) -> str:
    """Return untrusted text on one line. Invisible characters, and those of Markdown and HTML, are escaped."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", printable(" ".join(text.split())))
