"""Samples, shards and object storage, shared by all stages. Contains no models and does not import torch."""
