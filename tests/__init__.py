"""Tests, in folders like those of the project, and the commands parity, conformance and kill."""
