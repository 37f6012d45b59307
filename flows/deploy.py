"""Create the deployments in a file such as prefect.yaml, their work pools, and automations that detect crashed runs.

    vlbert deploy [FILE]

The deployments are created on the server at PREFECT_API_URL. `make serve` does this when it starts. Run the command
again after changing the file. Plain `prefect deploy` does not create these automations.
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

HEARTBEAT = 30  # seconds between two heartbeats of a flow run: Prefect's minimum
SILENCE = 70  # seconds without a heartbeat after which a run is marked as crashed: two are missing
START_LIMIT = 180  # seconds after which a pending run that has not begun is marked as crashed
ALARM = "flow runs without a sign of life are crashed"
NEVER_BEGAN = "flow runs that never begin are crashed"


def deploy(deployments: Path) -> None:
    """Create the work pools and deployments that a file describes, and the automations that detect crashed runs.

    Raises ChildFailed, with Prefect's error, if the file is invalid.
    """
    from prefect.client.orchestration import get_client  # here, because it reads settings that callers set first
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    entries = yaml.safe_load(deployments.read_text(encoding="utf-8"))["deployments"]
    with get_client(sync_client=True) as client:
        for pool in {entry["work_pool"]["name"] for entry in entries}:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    set_alarms()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    run_child(command, lambda line: None)


def set_alarms() -> None:
    """Create the Prefect automations that mark a flow run as crashed if its process and worker have both ended.

    Prefect itself does not notice this. Existing automations that have not changed are kept, because new ones would not
    watch the current runs.
    """
    from prefect.automations import Automation, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState

    heartbeat, pending, running = (f"prefect.flow-run.{name}" for name in ("heartbeat", "Pending", "Running"))
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    begun = ended | {f"prefect.flow-run.{state}" for state in ("Running", "Cancelling", "AwaitingConcurrencySlot")}
    silent, never_began = f"{NO_SIGN} for {SILENCE} s", f"{NO_SIGN} in its first {START_LIMIT} s"
    for name, after, expected, seconds, message in (
        (ALARM, {heartbeat, running}, {heartbeat, *ended}, SILENCE, f"{silent}: its process has ended"),
        (NEVER_BEGAN, {pending}, begun, START_LIMIT, f"{never_began}: its process has ended"),
    ):
        trigger = EventTrigger(
            after=after,
            expect=expected,
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=seconds),
        )
        actions = [ChangeFlowRunState(state=StateType.CRASHED, message=message)]
        with suppress(ValueError):  # raised if there is no automation of this name
            existing: Any = Automation.read(name=name)  # Prefect types it as a coroutine
            if (existing.trigger, existing.actions) == (trigger, actions):
                continue
            existing.delete()
        Automation(name=name, description="made by flows/deploy.py", trigger=trigger, actions=actions).create()


def deploy_file(file: Annotated[Path, Positional, tyro.conf.arg(metavar="FILE")] = Path("prefect.yaml")) -> None:
    """Create the deployments in a file, their work pools and automations, on the server at PREFECT_API_URL.

    Args:
        file: file of deployments, such as prefect.yaml
    """
    import httpx  # here, like prefect, so that --help is fast
    from prefect.settings import PREFECT_API_URL

    server = PREFECT_API_URL.value()
    if server is None:
        raise ValueError("PREFECT_API_URL is not set; set it to the server's URL, such as http://127.0.0.1:4200/api")
    try:
        deploy(file)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise ValueError(
            f"{server} rejects the password; set PREFECT_API_AUTH_STRING to the server's user:password"
        ) from error
    except httpx.TransportError as error:
        raise ValueError(f"cannot reach {server}: {error}; start the server, or set PREFECT_API_URL") from error


main = Command("vlbert deploy", deploy_file, ChildFailed)
