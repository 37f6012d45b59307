"""Prefect flows for all stages: their order, processes and retries. Read pipeline.py first."""

from storage.programs import require

require("prefect", "a flow")
