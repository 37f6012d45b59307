"""Rehearsal of a GPU: predict the kernels, transfers, waits, memory and time of a training step."""
