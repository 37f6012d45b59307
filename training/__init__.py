"""The training loop of any model, with its settings, processes, logs and checkpoints. It imports no model code."""
