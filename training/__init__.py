"""Training of any model: settings, processes, loop, log and checkpoints of a run. Imports no model code."""
