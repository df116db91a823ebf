"""Runs scripts on nothing but torch, one after another in a process that has never heard of nanscope."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

_RUNNER = """
import json, sys, warnings
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
said = []
for text in json.load(sys.stdin):
    try:
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
        said.append("")
    except BaseException as error:
        said.append(f"{type(error).__name__}: {error}")
assert "nanscope" not in sys.modules
print(json.dumps(said))
"""


def run_bare(scripts: Sequence[str]) -> list[str]:
    """Return what each script died of, "" where it came to its end."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NANSCOPE_MEMBER")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUNNER], input=json.dumps(list(scripts)), capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
