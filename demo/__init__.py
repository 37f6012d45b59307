"""Drawn scenes in the official file formats, served over HTTP: the default where nothing else is given."""
