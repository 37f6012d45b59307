"""Samples, shards and object storage, shared by all stages. Contains no models and imports no torch."""
