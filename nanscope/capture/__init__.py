"""Instruments in the trainer's process: they observe, and change nothing."""
