"""The demo: drawn scenes in the official file formats, served over HTTP, and the whole pipeline run on them."""
