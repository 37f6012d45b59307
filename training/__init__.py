"""How any model here is trained: settings, processes, loop, log and checkpoints of a run. Knows nothing of a model."""
