"""Prefect flows: what runs where, in which order, retried how. Read pipeline.py first."""

from storage.programs import require

require("prefect", "a flow")
