"""Prints what nanscope says of a training script as an `Expected`, to be checked by hand and pasted into the script.

$ python tests/incidents/new.py my_script.py
w = gain.exp() overflowed to +inf at [2, 1] of [6, 4], my_script.py:36: …

EXPECTED = Expected(
    phase=("forward",),
    …
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import torch
from expected import Expected

import nanscope


def load(path: Path) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watched(module: ModuleType, folder: Path) -> nanscope.Verdict:
    """What nanscope says of a run of the script. folder: where its snapshots go."""
    try:
        with nanscope.watch(out=folder) as scope:
            module.run()
    finally:
        torch.use_deterministic_algorithms(False)  # some scripts ask for it, so that fresh memory has a fixed content
        torch.set_default_dtype(torch.float32)  # and some for another one
    return scope.verdict


def said(verdict: nanscope.Verdict) -> Expected | None:
    """What a verdict says of its first incident, None if it has none."""
    if verdict.healthy:
        return None
    first = verdict.incidents[0]
    origin = first.origin
    text = dict(origin.source).get(origin.line) if origin.line is not None else None
    return Expected(
        phase=(first.phase,),
        cause=(str(first.cause),),
        op=(origin.op,),
        index=origin.index,
        masked=origin.masked,
        role=(origin.role or "",),
        fix=(first.fixes[0].id if first.fixes else "",),
        variable=(origin.variable,),
        line=(text if text is None else text.strip(),),
    )


def written(expected: Expected) -> str:
    """The source of what builds it."""
    return "\n".join(["Expected(", *(f"    {field.name}={_literal(getattr(expected, field.name))}," for field in fields(expected)), ")"])


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, str) and '"' not in value:
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one script and print what is said of it. Returns 1 if nothing is."""
    parser = argparse.ArgumentParser(description="Print what nanscope says of a training script as an Expected, to be checked by hand.")
    parser.add_argument("script", type=Path, help="a file with a function run()")
    with tempfile.TemporaryDirectory() as folder:
        verdict = watched(load(parser.parse_args(arguments).script), Path(folder))
    answer = said(verdict)
    print(verdict.sentence)
    if answer is None:
        return 1
    print(f"\nEXPECTED = {written(answer)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
