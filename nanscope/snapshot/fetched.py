"""Reads a run or a file that lies in a remote folder: what an address means is fetched into a folder of temporary files.

with fetched("s3://bucket/nanscope-runs") as found:
    found.path                        # of the run that began last, on this machine, until the block is left
    found.address(found.path / "run.json")      # s3://bucket/nanscope-runs/2026-11-21T20-15-03-train/run.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.snapshot.remote import Kept, Remote, is_remote
from nanscope.snapshot.runs import LATEST, in_order, pointed, wrote

SNAPSHOT = ".safetensors"


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a path or an address means, on this machine. path: of the file or folder. above, url: of what was fetched, "" for a path.
    listed: what the fetched runs hold, by the name of the run; runs: how many there are of which the last was fetched.
    """

    path: Path
    above: Path
    url: str = ""
    runs: int = 0
    listed: Mapping[str, Mapping[str, Kept]] = field(default_factory=dict)

    def sizes(self, run_dir: Path) -> dict[str, int]:
        """Return the files of a run and their bytes, fetched or not."""
        if self.url:
            return {name: kept.size for name, kept in self.listed.get(run_dir.name, {}).items()}
        return {path.name: path.stat().st_size for path in run_dir.iterdir() if path.is_file()}

    def address(self, path: Path | str) -> str:
        """Return how somebody else would call a file in it."""
        path = Path(path)
        if not self.url or not path.is_relative_to(self.above):
            return str(path)
        return "/".join((self.url, *path.relative_to(self.above).parts))


@contextmanager
def fetched(where: str | Path, wanted: Callable[[str], bool] = lambda name: True, every: bool = False) -> Iterator[Fetched]:
    """Give what a path or an address means: a file, a run, or of a folder of runs the one that began last; with `every` all of them.

    wanted: files of a run, by their name. Raises NanscopeError with the slug "no-run" for an address that nothing is at.
    """
    if not is_remote(where):
        yield Fetched(Path(where), Path(where))
        return
    with tempfile.TemporaryDirectory(prefix="nanscope-") as temporary:
        try:
            found = _fetch(str(where).rstrip("/"), Path(temporary), wanted, every)
        except OSError as error:
            raise NanscopeError(str(error), slug="no-run") from None
        yield found


def _fetch(url: str, above: Path, wanted: Callable[[str], bool], every: bool) -> Fetched:
    if url.endswith(SNAPSHOT):
        parent, _, name = url.rpartition("/")
        if not Remote(parent).fetch(above, lambda one: one == name):
            raise FileNotFoundError(f"there is no file {url}")
        return Fetched(above / name, above, parent)
    folder = Remote(url)
    names = folder.names()
    if any(wrote(name) for name in names):
        folder.fetch(above, wanted)
        return Fetched(above, above, url)
    runs = sorted((name.rstrip("/") for name in names if name.endswith("/")), key=in_order)
    if not runs:
        raise FileNotFoundError(f"there is no run at {url}")
    if LATEST in names:
        folder.get(LATEST, above / LATEST)
    last = pointed(above)
    listed = {}
    for run in runs if every else [last if last in runs else runs[-1]]:
        listed[run] = (folder / run).names()
        (folder / run).fetch(above / run, wanted)
    return Fetched(above, above, url, len(runs), listed)
