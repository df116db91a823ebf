"""From a saved step to a verdict: the cause, the fixes that were seen to work, and one sentence."""
