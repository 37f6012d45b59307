"""The demo: draws data in the official file formats, serves it over HTTP, and runs the whole pipeline on it."""
