"""The recorded step again, changed: edits of its program, and other losses on its batch."""
