"""The atlas of contamination: which fault reaches the loss, or the gradient, on which loss path of which framework.

    trl.dapo            old +200 at a masked token, A > 0   →  M     the loss is finite, the gradient of a padding token is NaN
    verl.vanilla        the same                            →  ·     the log-ratio is clamped before exp

Notable: nothing here is a stored table. `atlas` runs every cell on a batch of three rows into which one fault was put; `verify` runs the
same cells through the functions of the frameworks that are installed.
"""

from nanscope.atlas.cells import atlas
from nanscope.atlas.verification import verify

__all__ = ["atlas", "verify"]
