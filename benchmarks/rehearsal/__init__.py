"""Rehearse a training step without a GPU: predict its kernels, transfers, waits, memory and time on one."""
