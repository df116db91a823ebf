"""One bad step in one file, and one line for every other."""
