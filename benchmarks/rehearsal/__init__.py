"""Rehearsal of a training step: predict its kernels, transfers, waits, memory and time on a GPU without having one."""
