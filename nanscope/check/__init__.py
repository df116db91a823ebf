"""What would kill this loss, although it has not happened yet; and what it loses in precision."""
