"""Weights of the detector: our files, the published releases, and pickles that are read without running code."""
