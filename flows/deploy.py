"""Deploy: the work pools, the alarms, and the deployments of a file such as prefect.yaml, at the server of
PREFECT_API_URL.

    vlbert deploy [FILE]

`make serve` does it by itself. Do it again after a change of the file. `prefect deploy` alone makes no alarm.
"""

import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from flows.prefect_patches import NO_SIGN
from flows.supervisor import ChildFailed, run_child
from storage.programs import Command, Positional

HEARTBEAT = 30  # seconds between two signs of life of a flow run: the least that Prefect takes
SILENCE = 70  # seconds without one after which a run counts as crashed: two are missing
BEGINNING = 180  # seconds after which a run counts as crashed whose process was to start and has not begun
ALARM = "flow runs without a sign of life are crashed"
NEVER_BEGAN = "flow runs that never begin are crashed"


def deploy(deployments: Path) -> None:
    """Make the work pools and the deployments of the file, and the alarms.

    Raises ChildFailed, with Prefect's words, if the file is wrong.
    """
    from prefect.client.orchestration import get_client  # here, because what it reads is set before
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    found = yaml.safe_load(deployments.read_text(encoding="utf-8"))["deployments"]
    with get_client(sync_client=True) as client:
        for pool in {one["work_pool"]["name"] for one in found}:
            with suppress(ObjectAlreadyExists):
                client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    set_alarms()
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    run_child(command, lambda line: None)


def set_alarms() -> None:
    """Make the automations that crash a flow run whose process and worker are both gone: nobody else reports that.

    One that is there as it should be is left alone: a change forgets which runs it was waiting for.
    """
    from prefect.automations import Automation, EventTrigger, Posture
    from prefect.client.schemas.objects import StateType
    from prefect.events.actions import ChangeFlowRunState

    sign, begun, running = (f"prefect.flow-run.{name}" for name in ("heartbeat", "Pending", "Running"))
    ended = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    left = ended | {f"prefect.flow-run.{state}" for state in ("Running", "Cancelling", "AwaitingConcurrencySlot")}
    for name, after, expected, seconds, message in (
        (ALARM, {sign, running}, {sign, *ended}, SILENCE, f"{NO_SIGN} for {SILENCE} s: its process is gone"),
        (NEVER_BEGAN, {begun}, left, BEGINNING, f"{NO_SIGN} in its first {BEGINNING} s: its process is gone"),
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
        with suppress(ValueError):  # there is none of this name
            found = Automation.read(name=name)
            if (found.trigger, found.actions) == (trigger, actions):
                continue
            found.delete()
        Automation(name=name, description="made by flows/deploy.py", trigger=trigger, actions=actions).create()


def deploy_file(file: Annotated[Path, Positional, tyro.conf.arg(metavar="FILE")] = Path("prefect.yaml")) -> None:
    """Deploy the work pools, the alarms and the deployments of a file, at the server of PREFECT_API_URL.

    Args:
        file: such as prefect.yaml
    """
    import httpx  # here, as prefect: --help is fast
    from prefect.settings import PREFECT_API_URL

    server = PREFECT_API_URL.value()
    if server is None:
        raise ValueError("PREFECT_API_URL is not set; it says where the server is, such as http://127.0.0.1:4200/api")
    try:
        deploy(file)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise ValueError(
            f"{server} refuses the password; set PREFECT_API_AUTH_STRING to the server's user:password"
        ) from error
    except httpx.TransportError as error:
        raise ValueError(f"cannot reach {server}: {error}; start the server, or set PREFECT_API_URL") from error


main = Command("vlbert deploy", deploy_file, ChildFailed)
