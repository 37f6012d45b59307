"""Our loaders, scorers and rules beside what official code says: `python -m tests.conformance`."""
