"""Weight files of the detector, our own and published ones. Pickles are read without running their code."""
