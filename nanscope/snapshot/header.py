"""The head of a snapshot file: what is in it, read with the standard library alone, so `inspect` needs no torch.

SCHEMA_VERSION history: 1 — first release. 2 — `objective`, the framework's loss and its settings; absent in a file of 1. 3 — `checksum`,
absent in files of 1 and 2.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanscope.errors import SnapshotError
from nanscope.plain import is_deep, loaded
from nanscope.snapshot.checksum import intact
from nanscope.snapshot.files import reading

KEY = "nanscope"

SCHEMA_VERSION = 3

SEALED = 3  # the first one whose files have a checksum

MOST_DIMENSIONS = 64  # of a tensor: torch has no more

LARGEST_HEADER = 100 << 20  # bytes; the limit of the safetensors format itself
MANY = 1 << 17  # lists and objects in a head; in what is written there is one in 12 bytes at most, and an empty one takes 64 of memory
DENSE = 8  # bytes a list or object, beyond that


@dataclass(frozen=True, slots=True)
class TensorHead:
    """One tensor of the file: name, dtype (as safetensors writes it), shape, size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file and the description that nanscope wrote. size: bytes of the whole file."""

    tensors: tuple[TensorHead, ...]
    about: dict[str, Any]
    size: int


def read_header(path: Path | str) -> Header:
    """Return the head of a snapshot.

    Raises SnapshotError if the file is missing, damaged, not a snapshot, or written by a newer release.
    """
    path = Path(path)
    try:
        with reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise SnapshotError(f"{path}: not a snapshot, the file has {size} bytes", slug="snapshot-empty")
            (length,) = struct.unpack("<Q", start)
            if length > LARGEST_HEADER:
                raise SnapshotError(
                    f"{path}: not a safetensors file, or damaged (its header claims {length} bytes)", slug="snapshot-header"
                )
            raw = file.read(length)
    except IsADirectoryError:
        raise SnapshotError(
            f"{path}: is a folder; name a snapshot in it, as step-000412.rank0.safetensors", slug="snapshot-unreadable"
        ) from None
    except (OSError, ValueError) as error:  # the latter for a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise SnapshotError(f"{path}: cannot be read ({why})", slug="snapshot-unreadable") from None
    if len(raw) < length:
        raise SnapshotError(f"{path}: truncated, the header has {len(raw)} of {length} bytes", slug="snapshot-truncated")
    try:
        if raw.count(b"{") + raw.count(b"[") > MANY + length // DENSE:
            raise ValueError("made of empty lists")
        head = json.loads(raw)
        metadata = head.pop("__metadata__", {}) if isinstance(head, dict) else {}
        text = metadata.get(KEY) if isinstance(metadata, dict) else None
    except (ValueError, RecursionError):
        raise SnapshotError(f"{path}: not a safetensors file, or damaged (its header is not readable)", slug="snapshot-header") from None
    if not isinstance(text, str):
        raise SnapshotError(
            f"{path}: a safetensors file, but not a nanscope snapshot (no {KEY!r} in its metadata)", slug="snapshot-foreign"
        )
    try:
        about = loaded(text)
        if is_deep(about):
            raise ValueError("nested too deeply")
        schema = about["schema"]
        tensors = tuple(sorted((_tensor(name, entry) for name, entry in head.items()), key=lambda tensor: tensor.name))
        end = _end_of([entry["data_offsets"] for entry in head.values()])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{path}: the description is damaged ({type(error).__name__})", slug="snapshot-damaged") from None
    if type(schema) is not int or not 0 < schema < 1 << 31:  # neither shown nor taken for a release: a file may hold anything
        raise SnapshotError(f"{path}: the description is damaged (its schema is not one)", slug="snapshot-damaged")
    if schema > SCHEMA_VERSION:
        raise SnapshotError(
            f"{path}: written in snapshot format {schema}, this nanscope reads up to {SCHEMA_VERSION}; "
            "upgrade with `pip install -U nanscope`",
            slug="snapshot-newer",
        )
    if size < 8 + length + end:
        raise SnapshotError(f"{path}: truncated, {size} of {8 + length + end} bytes", slug="snapshot-truncated")
    return Header(tensors, about, size)


def _tensor(name: str, entry: dict[str, Any]) -> TensorHead:
    start, end = entry["data_offsets"]
    if len(entry["shape"]) > MOST_DIMENSIONS:
        raise ValueError(f"{len(entry['shape'])} dimensions")
    return TensorHead(str(name), str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), int(end) - int(start))


def _end_of(places: list[list[int]]) -> int:
    """Return where the last tensor ends. Raises ValueError where one does not begin where another ends: each byte is read once."""
    end = 0
    for start, stop in sorted((int(start), int(stop)) for start, stop in places):
        if not end == start <= stop:
            raise ValueError("tensors overlap")
        end = stop
    return end


def verify(path: Path | str, header: Header) -> bool:
    """Compare a file with its checksum, reading all of it; False if it is of a schema that had none.

    Raises SnapshotError if they differ, or the file has lost it.
    """
    try:
        found = intact(Path(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, OverflowError):
        found = False
    if found is False or (found is None and header.about["schema"] >= SEALED):
        raise SnapshotError(
            f"{path}: damaged, it is not what was written (the checksum differs); copy or download it again", slug="snapshot-damaged"
        )
    return bool(found)
