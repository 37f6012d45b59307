"""Compare how exactly data loaders resume. `python -m benchmarks.resume` runs it, with the adapters in this folder."""
