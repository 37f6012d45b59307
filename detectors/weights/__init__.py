"""Weight files of the detector: our own and the published ones, whose pickles are read without running code."""
