"""One watched run: opens each step, closes it, and keeps what went wrong."""
