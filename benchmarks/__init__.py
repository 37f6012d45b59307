"""Benchmarks of the project's code, with one program per subject."""
