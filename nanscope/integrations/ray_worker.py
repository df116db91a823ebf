"""What a Ray worker does before anything else: it takes part in a run from the moment that it imports torch.

Notable: Ray calls this in every worker, also in those that only count or fetch: torch must not be imported here.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

INVITED = "NANSCOPE_RAY_MEMBER"  # the invitation; under another name than elsewhere, at which `import nanscope` would import torch
ALSO = "NANSCOPE_RAY_ALSO"  # the setup hook that would have been called without us


def begin() -> None:
    """Take part; then what else was to be called. Of ours nothing is raised: Ray ends a worker whose setup fails."""
    invitation = os.environ.get(INVITED)
    if invitation is not None:
        os.environ["NANSCOPE_MEMBER"] = invitation
        children = str(Path(__file__).parents[1] / "watching" / "children")
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), children])
        sys.path.append(children)
        if "torch" in sys.modules:
            import_module("nanscope_child").begin()
    also = os.environ.get(ALSO, "")
    if also:
        module, _, name = also.rpartition(".")
        getattr(import_module(module), name)()
