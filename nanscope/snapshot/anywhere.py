"""A snapshot, or the history of a run, by a path or by an address."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nanscope.snapshot import file
from nanscope.snapshot import history as lines
from nanscope.snapshot.fetched import fetched
from nanscope.snapshot.step import Snapshot

if TYPE_CHECKING:
    import pandas


def load(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot. path: of the file, or its address, as s3://bucket/runs/2026-11-21T20-15-03-train/step-000412.rank0.safetensors.

    Raises SnapshotError if the file is missing, damaged, not a snapshot, or written by a newer release, and NanscopeError with the slug
    "no-run" for an address that nothing is at.
    """
    with fetched(os.fspath(path)) as found:
        return file.load(found.path)


def history(run_dir: str | os.PathLike[str]) -> pandas.DataFrame:
    """Return the history of a run as a pandas frame: one row per step and rank, indexed by step, a column for each field of `Entry`.

    run_dir: of one run, or a folder of runs: of those the latest; a path or an address.
    Raises NanscopeError with the slug "no-run" if there is no history.
    """
    with fetched(os.fspath(run_dir), lambda name: name.endswith(lines.SUFFIX)) as found:
        return lines.history(found.path, str(run_dir))
