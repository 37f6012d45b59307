"""The training loop for all models, with its settings, processes, logs and checkpoints. Imports no model code."""
