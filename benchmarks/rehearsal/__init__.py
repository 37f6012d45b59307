"""The rehearsal of a GPU: what a training step would launch, move, wait for and hold, and how long it would take."""
