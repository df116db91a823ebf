"""A folder that is on no disk of this machine: any address that fsspec knows, as s3://bucket/runs, gs://bucket/runs, file:///mnt/runs.

Notable: a store keeps whole files and cannot append, so that files are sent and fetched whole; what it raises is of its own classes, and
becomes OSError here, which whoever writes files is ready for.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanscope.snapshot.files import PREFIX, SUFFIX, whole
from nanscope.snapshot.processes import mark

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")

# Where half a file can be read: there it is written under another name first. Elsewhere it is there at once, or not at all.
IN_PIECES = frozenset({"file", "local", "sftp", "ssh", "smb", "ftp", "hdfs", "webhdfs", "nfs", "dbfs", "jlab", "jupyter"})

TIMES = ("mtime", "LastModified", "last_modified", "updated", "created", "timeModified")  # as one store or another calls it


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Is this an address, and no path? A path of one letter and a colon is none."""
    return _ADDRESS.match(os.fspath(path)) is not None


@dataclass(frozen=True, slots=True)
class Kept:
    """One file of a remote folder. size: bytes. state: changes when the file does, as far as the store tells."""

    size: int
    state: str


class Remote:
    """A remote folder. url: its address, as it was given. Every method raises OSError with the store's own words."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with _told(self.url):
            from fsspec.core import url_to_fs

            self._store, self._root = url_to_fs(self.url, use_listings_cache=False)

    def __truediv__(self, name: str) -> Remote:
        """Return the folder of this name in it."""
        return Remote(f"{self.url}/{name}")

    def address(self, name: str) -> str:
        """Return the address of one file in it."""
        return f"{self.url}/{name}"

    def names(self) -> dict[str, Kept]:
        """Return the files and folders in it, none if there is no such folder; a folder's name ends in /. Half a file is none."""
        with _told(self.url):
            try:
                found = self._store.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
        kept = {}
        for about in found:
            name = str(about["name"]).rstrip("/").rpartition("/")[2]
            if _is_plain(name) and not _is_itself(about, self._root):
                kept[name + "/" * (about.get("type") == "directory")] = Kept(int(about.get("size") or 0), _state(about))
        return kept

    def has(self, name: str) -> bool:
        """Is there a file of this name?"""
        with _told(self.address(name)):
            return bool(self._store.exists(f"{self._root}/{name}"))

    def read(self, name: str) -> bytes:
        """Return what is in a file."""
        with _told(self.address(name)):
            found: bytes = self._store.cat_file(f"{self._root}/{name}")
            return found

    def put(self, name: str, source: Path | bytes) -> None:
        """Write a file, whole, in place of what has its name."""
        with _told(self.address(name)):
            target = f"{self._root}/{name}"
            in_pieces = bool(IN_PIECES & set(_protocols(self._store)))
            written = f"{self._root}/{PREFIX}{mark()}-{name}{SUFFIX}" if in_pieces else target
            if in_pieces:
                self._store.makedirs(self._root, exist_ok=True)
            if isinstance(source, bytes):
                self._store.pipe_file(written, source)
            else:
                self._store.put_file(str(source), written)
            if in_pieces:
                self._store.mv(written, target)

    def get(self, name: str, target: Path) -> None:
        """Fetch a file, whole."""
        with _told(self.address(name)), whole(target) as temporary:
            self._store.get_file(f"{self._root}/{name}", str(temporary))

    def remove(self, name: str) -> None:
        """Remove a file; none of that name is as good."""
        with _told(self.address(name)), contextlib.suppress(FileNotFoundError):
            self._store.rm_file(f"{self._root}/{name}")

    def fetch(
        self, folder: Path, wanted: Callable[[str], bool] = lambda name: True, known: Mapping[str, Kept] | None = None
    ) -> dict[str, Kept]:
        """Fetch the wanted files that are not there, or have changed since `known`; return what is known then. wanted: by their name."""
        folder.mkdir(parents=True, exist_ok=True)
        now = dict(known or {})
        for name, kept in sorted(self.names().items()):
            if not name.endswith("/") and wanted(name) and (now.get(name) != kept or not (folder / name).exists()):
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    self.get(name, folder / name)
                    now[name] = kept
        return now


@contextlib.contextmanager
def _told(address: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise OSError(f"{address} cannot be reached ({error})") from None
    except Exception as error:  # noqa: BLE001 - each store has errors of its own
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        raise kind(f"{address} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})") from None


def _protocols(store: Any) -> tuple[str, ...]:
    found = store.protocol
    return (found,) if isinstance(found, str) else tuple(found)


def _is_plain(name: str) -> bool:
    written = name.startswith(PREFIX) and name.endswith(SUFFIX)
    return not written and name not in ("", ".", "..") and "\\" not in name and "\0" not in name


def _is_itself(about: dict[str, Any], root: str) -> bool:
    """A store lists an empty object that stands for the folder, or the file itself where the address is that of a file."""
    return str(about["name"]).strip("/") == root.strip("/")


def _state(about: dict[str, Any]) -> str:
    tag = about.get("ETag") or about.get("etag") or about.get("md5Hash")
    return str(tag or next((about[key] for key in TIMES if about.get(key)), about.get("size")))
