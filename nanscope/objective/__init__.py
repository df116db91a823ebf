"""The policy loss of RL post-training, written once."""
