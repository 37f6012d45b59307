"""One run on several machines: it starts further runs of its deployment, which the workers of other machines take.

Collection and detection share the shards by claims in the storage (storage/claims.py), so the runs need to know nothing
of each other. Each ends when the whole stage is there. Cancelling the first cancels all.
"""

from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run
from prefect.states import Cancelled, Cancelling

from flows.artifacts import reporting


def start_others(machines: int) -> None:
    """Start `machines` - 1 runs with the parameters of this one; ValueError where its deployment cannot run so many."""
    if machines < 1:
        raise ValueError(f"machines is {machines}; it must be at least 1")
    if machines == 1:
        return
    with get_client(sync_client=True) as client:
        ours = client.read_flow_run(flow_run.get_id())
        if ours.deployment_id is None:
            raise ValueError(
                f"machines is {machines}, and this run has no deployment that other workers could run; start it with "
                "`prefect deployment run`"
            )
        deployment = client.read_deployment(ours.deployment_id)
        limit = deployment.global_concurrency_limit
        if limit is not None and limit.limit < machines:
            raise ValueError(
                f"machines is {machines}, and {ours.name}'s deployment {deployment.name} runs {limit.limit} at a time; "
                f"set its concurrency_limit in prefect.yaml to {machines}, and deploy it"
            )
        for _ in range(machines - 1):
            client.create_flow_run_from_deployment(
                ours.deployment_id, parameters=ours.parameters | {"machines": 1}, tags=[*ours.tags, _tag(ours.id)]
            )


def cancel_waiting(machines: int) -> None:
    """Cancel those of the other runs that no worker has taken: there is nothing left to do."""
    if machines == 1:
        return
    with reporting(), get_client(sync_client=True) as client:
        for run in _others(client, UUID(flow_run.get_id())):
            if run.state and (run.state.is_scheduled() or run.state.is_pending()):
                message = "no worker was free for it, and the stage is complete"
                client.set_flow_run_state(run.id, Cancelled(message=message), force=True)


def cancel_others(flow: Flow, run: FlowRun, state: State) -> None:
    """A hook for the cancellation of `run`: cancel the runs that it has started."""
    with get_client(sync_client=True) as client:
        for other in _others(client, run.id):
            waits = other.state is None or other.state.is_scheduled()
            client.set_flow_run_state(
                other.id, (Cancelled if waits else Cancelling)(message=f"with {run.name}"), force=True
            )


def _others(client: SyncPrefectClient, run: UUID) -> list[FlowRun]:
    """The runs that `run` has started and that have not ended."""
    tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[_tag(run)]))
    return [one for one in client.read_flow_runs(flow_run_filter=tagged) if not one.state or not one.state.is_final()]


def _tag(run: UUID) -> str:
    return f"with:{run}"
