"""Prefect flows of all stages: their order, their processes and their retries. Read pipeline.py first."""

from storage.programs import require

require("prefect", "a flow")
