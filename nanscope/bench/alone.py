"""What a process that measures one thing runs: `… -m nanscope.bench.alone growth:jobs '[[2], "folder"]' 1` prints what it returns."""

from __future__ import annotations

import json
import pkgutil
import sys

import torch

if __name__ == "__main__":
    function, arguments, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    found = pkgutil.resolve_name(f"nanscope.bench.{function}")(*json.loads(arguments))
    sys.stdout.write(f"\n{json.dumps(found)}\n")
