"""Samples, shards and object storage: the files that all stages share. No models, no torch."""
