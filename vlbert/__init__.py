"""VL-BERT (Su et al., ICLR 2020): the model as a library, and the program that trains it."""
