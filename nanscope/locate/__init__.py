"""From a run of a program to the first harmful value."""
