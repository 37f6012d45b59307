"""Spread a flow run over several machines: start more runs of its deployment, for workers on other machines.

Each run claims the shards that it processes (storage/claims.py), so the runs are independent of each other. Each run
ends when the whole stage is complete. Cancelling the first run cancels all of them.
"""

from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.runtime import flow_run as current_run
from prefect.states import Cancelled, Cancelling


def start_others(machines: int) -> None:
    """Start `machines` - 1 more runs of this flow run's deployment, with the same parameters.

    Raises ValueError if the deployment's concurrency limit is too low.
    """
    if machines < 1:
        raise ValueError(f"machines is {machines}; it must be at least 1")
    if machines == 1:
        return
    with get_client(sync_client=True) as client:
        ours = client.read_flow_run(UUID(current_run.get_id()))
        if ours.deployment_id is None:
            raise ValueError(f"machines is {machines}, but this run has no deployment; use `prefect deployment run`")
        limit = client.read_deployment(ours.deployment_id).global_concurrency_limit
        if limit is not None and limit.limit < machines:
            raise ValueError(
                f"machines is {machines}, but the deployment of {ours.name} allows {limit.limit} runs at a time; set "
                f"its concurrency_limit in prefect.yaml to {machines}, and deploy it"
            )
        for _ in range(machines - 1):
            client.create_flow_run_from_deployment(
                ours.deployment_id, parameters=ours.parameters | {"machines": 1}, tags=[*ours.tags, f"with:{ours.id}"]
            )


def cancel_others(flow: Flow, flow_run: FlowRun, state: State) -> None:
    """Cancel the runs that `flow_run` started with `start_others`. Flows use this as a cancellation hook."""
    started = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"with:{flow_run.id}"]))
    with get_client(sync_client=True) as client:
        for other in client.read_flow_runs(flow_run_filter=started):
            if other.state is None or not other.state.is_final():
                scheduled = other.state is None or other.state.is_scheduled()
                cancelled = (Cancelled if scheduled else Cancelling)(message=f"with {flow_run.name}")
                client.set_flow_run_state(other.id, cancelled, force=True)
