"""Prefect flows: one for each stage, and one for the whole pipeline. Read pipeline.py first."""

from storage.programs import require

require("prefect", "a flow")
