"""A snapshot, or the history of a run, by a path or by an address."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nanscope.given import a_path
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
    with fetched(a_path("load(…)", path, "the path or address of a snapshot")) as found:
        return file.load(found.path)


def loaded(what: Snapshot | str | os.PathLike[str], name: str = "snapshot") -> Snapshot:
    """Return a snapshot that was given as it is, or by its path or address. name: of the argument. Raises as `load` does."""
    if isinstance(what, Snapshot):
        return what
    with fetched(a_path(name, what, "a snapshot, its path or its address")) as found:
        return file.load(found.path)


def history(run_dir: str | os.PathLike[str]) -> pandas.DataFrame:
    """Return the history of a run as a pandas frame: one row per step and rank, indexed by step, a column for each field of `Entry`.

    run_dir: of one run, or a folder of runs: of those the latest; a path or an address. A file of a run stands for its folder.
    Raises NanscopeError with the slug "no-run" if there is no history.
    """
    where = a_path("history(…)", run_dir, "the path or address of a run, or of a folder of runs")
    with fetched(where, lambda name: name.endswith(lines.SUFFIX)) as found:
        return lines.history(found.path.parent if found.path.is_file() else found.path, where)
