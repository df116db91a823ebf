"""The policy loss of RL post-training, written once."""

from nanscope.objective import advantages

__all__ = ["advantages"]
