"""Benchmarks of the project's real parts, one program per subject."""
