"""Writers of shards and trainings, killed with SIGKILL again and again: `python -m tests.kill`."""
