"""Our models beside figures that the published programs left: `python -m tests.parity DIR...`."""
