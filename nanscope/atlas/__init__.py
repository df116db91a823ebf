"""Which fault reaches the loss, or the gradient, on which loss of which framework."""
