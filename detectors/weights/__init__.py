"""Weights of the detector: our files, the published releases, and pickles read without running anything."""
