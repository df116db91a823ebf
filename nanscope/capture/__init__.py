"""The wing that runs inside the trainer's process: it observes, and changes nothing."""
