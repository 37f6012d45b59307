"""Deploy: the work pools, the alarms, and the deployments of a file such as prefect.yaml, at the server of
PREFECT_API_URL.

    vlbert deploy [FILE] [--notify TYPE/NAME]

`make serve` does it by itself. Do it again after a change of the file. `prefect deploy` alone makes no alarm.
"""

import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import tyro
import yaml

from flows.prefect_patches import NO_SIGN
from flows.supervisor import ChildFailed, run_child
from storage.programs import Command, Positional

HEARTBEAT = 30  # seconds between two signs of life of a flow run: the least that Prefect takes
SILENCE = 70  # seconds without one after which a run counts as crashed: two are missing
BEGINNING = 180  # seconds after which a run counts as crashed whose process was to start and has not begun
_ALARM = "flow runs without a sign of life are crashed"
_NEVER_BEGAN = "flow runs that never begin are crashed"
_NOTIFY = "flow runs that failed or crashed are announced"


def deploy(deployments: Path, notify: str | None = None) -> None:
    """Make the work pools and the deployments of the file, and the alarms; ChildFailed with Prefect's words where the
    file is wrong. notify: TYPE/NAME of the notification block that announces failed and crashed runs."""
    from prefect.client.orchestration import get_client  # here, because what it reads is set before
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with get_client(sync_client=True) as client:
        for pool in work_pools(deployments):
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    set_alarms()
    if notify is not None:
        announce(notify)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    run_child(command, lambda line: None)


def work_pools(deployments: Path) -> list[str]:
    """The names of the work pools in the file."""
    found = yaml.safe_load(deployments.read_text(encoding="utf-8"))["deployments"]
    return sorted({one["work_pool"]["name"] for one in found})


def set_alarms() -> None:
    """The automations that crash a flow run whose process and worker are both gone: nobody else reports that."""
    from prefect.automations import EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState

    sign, begun, running = (f"prefect.flow-run.{name}" for name in ("heartbeat", "Pending", "Running"))
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    left = ended | {f"prefect.flow-run.{state}" for state in ("Running", "Cancelling", "AwaitingConcurrencySlot")}
    for name, after, expected, seconds, message in (
        (_ALARM, {sign, running}, {sign, *ended}, SILENCE, f"{NO_SIGN} for {SILENCE} s: its process is gone"),
        (_NEVER_BEGAN, {begun}, left, BEGINNING, f"{NO_SIGN} in its first {BEGINNING} s: its process is gone"),
    ):
        wanted = {
            "description": f"made by flows/deploy.py; a run gives a sign of life every {HEARTBEAT} s",
            "trigger": EventTrigger(
                after=after,
                expect=expected,
                match={"prefect.resource.id": ["prefect.flow-run.*"]},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=seconds),
            ),
            "actions": [ChangeFlowRunState(state=StateType.CRASHED, message=message)],
        }
        set_automation(name, wanted)


def announce(block: str) -> None:
    """The automation that sends a message about each run that failed or crashed; ValueError where there is no block."""
    from prefect.automations import EventTrigger, Posture
    from prefect.client.orchestration import get_client
    from prefect.events.actions import SendNotification
    from prefect.exceptions import ObjectNotFound

    kind, _, name = block.partition("/")
    with get_client(sync_client=True) as client:
        try:
            document = client.read_block_document_by_name(name, kind)
        except ObjectNotFound as error:
            raise ValueError(
                f"--notify {block}: the server has no such block; make it in the flow UI under Blocks, and give it as "
                "TYPE/NAME, such as slack-webhook/alerts"
            ) from error
    wanted = {
        "description": "made by flows/deploy.py",
        "trigger": EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        "actions": [
            SendNotification(
                block_document_id=document.id,
                subject="{{ flow.name }}: {{ flow_run.state.name }}",
                body="{{ flow_run.name }}: {{ flow_run.state.message }}\n{{ flow_run | ui_url }}",
            )
        ],
    }
    set_automation(_NOTIFY, wanted)


def set_automation(name: str, wanted: dict[str, Any]) -> None:
    """Make the automation of this name, or change it if it differs: a change forgets which runs it was waiting for."""
    from prefect.automations import Automation

    new = Automation(name=name, **wanted)
    try:
        found = Automation.read(name=name)
    except ValueError:
        new.create()
        return
    if any(getattr(found, field) != getattr(new, field) for field in wanted):
        for field, value in wanted.items():
            setattr(found, field, value)
        found.update()


def deploy_file(
    file: Annotated[Path, Positional, tyro.conf.arg(metavar="FILE")] = Path("prefect.yaml"), notify: str | None = None
) -> None:
    """Deploy the work pools, the alarms and the deployments of a file, at the server of PREFECT_API_URL.

    Args:
        file: such as prefect.yaml
        notify: TYPE/NAME of the block that announces failed and crashed runs
    """
    import httpx  # here, as prefect: --help is fast
    from prefect.settings import PREFECT_API_URL

    server = PREFECT_API_URL.value()
    if server is None:
        raise ValueError("PREFECT_API_URL is not set; it says where the server is, such as http://127.0.0.1:4200/api")
    try:
        deploy(file, notify)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise ValueError(
            f"{server} refuses the password; set PREFECT_API_AUTH_STRING to the server's user:password"
        ) from error
    except httpx.TransportError as error:
        raise ValueError(f"cannot reach {server}: {error}; start the server, or set PREFECT_API_URL") from error
    except FileNotFoundError as error:
        raise ValueError(f"there is no file {file}; name one such as prefect.yaml") from error


main = Command("vlbert deploy", deploy_file, ChildFailed)
