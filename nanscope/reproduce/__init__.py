"""From a saved step to the smallest script of torch that fails alike."""
