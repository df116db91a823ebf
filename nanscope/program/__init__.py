"""The loss as data: calls that are sliced, edited, and run again bit for bit."""
