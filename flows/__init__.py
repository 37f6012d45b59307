"""Prefect flows: what runs where, in which order, retried how. Read pipeline.py first."""
