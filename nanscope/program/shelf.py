"""Puts large tensors away in a file, so that a step can be walked without holding every value of it in memory.

    put = shelf.put(tensor)     # written to a temporary file; a small tensor stays as it is
    put.take()                  # the same bits, shape and strides, mapped: only what is read comes back, and goes again with the tensor

A program of thirty calls on a batch of 512 × 8192 makes thirty tensors of 16 MiB, and as many gradients; a walk through it reads a few
elements of each. The file has no name any more once it is open: it goes with the last tensor in it, also if the process is killed. One
tensor at a time is written while the next one is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import IO, TypeAlias

import torch
from torch import Tensor

from nanscope.torch_inside import drop_storage_handle, storage_gone, storage_handle, writes_counted

LEAST = 4 << 20  # bytes of a tensor that is worth a file

LIMIT = 16 << 30  # bytes of one shelf; what comes after stays in memory: nobody's disk is to be filled

SPARE = 4  # part of the free disk that a shelf may take


class _Underway:
    """A tensor on its way into a file. tensor: is held until it is there, or for good where it could not be written."""

    def __init__(self, tensor: Tensor, file: IO[bytes], offset: int, length: int) -> None:
        self.tensor: Tensor | None = tensor
        memory = memoryview((ctypes.c_char * length).from_address(tensor.data_ptr()))  # as numpy would see it, which may be missing
        self._thread: threading.Thread | None = threading.Thread(target=self._write, args=(memory, file, offset), daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no other thread to be had
            self._thread = None
            self._write(memory, file, offset)

    def is_over(self) -> bool:
        """Wait for it: is the tensor in the file?"""
        if self._thread is not None:
            self._thread.join()
        return self.tensor is None

    def _write(self, memory: memoryview, file: IO[bytes], offset: int) -> None:
        with contextlib.suppress(Exception):  # whatever fails, it stays in memory
            written = 0
            while written < len(memory):
                written += os.pwrite(file.fileno(), memory[written:], offset + written)
            self.tensor = None


@dataclass(frozen=True, slots=True)
class Put:
    """A tensor in a file, or on its way there. offset, length: bytes."""

    file: IO[bytes]
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    writing: _Underway

    def take(self) -> Tensor:
        """Return the tensor. It is a mapping of the file: changes to it stay with it. Where the disk was full it is the tensor itself."""
        if not self.writing.is_over() and self.writing.tensor is not None:
            return self.writing.tensor
        memory = mmap.mmap(self.file.fileno(), self.length, access=mmap.ACCESS_COPY, offset=self.offset)
        return torch.frombuffer(memory, dtype=self.dtype).as_strided(self.shape, self.stride)


# Of a tensor: where and how it lies, and how often it was written to.
_Place: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype, int]


def _place_of(tensor: Tensor) -> _Place | None:
    """None if nobody counts the writes to it."""
    if tensor.is_inference():
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, writes_counted(tensor)


class _Memory:
    """The memory of a tensor, which is not held by this: is it gone? If not, nothing else lies there."""

    __slots__ = ("_handle",)

    def __init__(self, tensor: Tensor) -> None:
        self._handle = storage_handle(tensor.untyped_storage())

    def gone(self) -> bool:
        return bool(storage_gone(self._handle))

    def __del__(self) -> None:
        if drop_storage_handle is not None:  # None while the interpreter shuts down
            drop_storage_handle(self._handle)


class Shelf:
    """Where one run puts its large values; nobody may write to one of them before `settle`. least: bytes of a tensor from which on it is
    put away."""

    def __init__(self, least: int = LEAST) -> None:
        self._least = least
        self._file: IO[bytes] | None = None
        self._end = 0
        self._room = LIMIT
        self._known: dict[_Place, tuple[Put, _Memory]] = {}  # what has been put away, and is still held as well
        self._writing: _Underway | None = None  # the last one

    def put(self, tensor: Tensor) -> Tensor | Put:
        """Return what stands for the tensor, detached: the tensor itself if it is small, not in main memory, or has holes.

        Where the disk is full it stays in memory, too.
        """
        tensor = tensor.detach()
        length = tensor.numel() * tensor.element_size()
        if length < self._least or not tensor.is_cpu or not _is_dense(tensor):
            return tensor
        place = _place_of(tensor)
        known = None if place is None else self._known.get(place)
        if known is not None and not known[1].gone():
            return known[0]
        self.settle()
        if self._end + length > self._room:
            return tensor
        try:
            file, offset = self._opened(), self._end
        except OSError:
            self._room = 0
            return tensor
        give_back()  # what other tensors of this size were in
        self._end = -(-(offset + length) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._writing = _Underway(tensor, file, offset, length)
        put = Put(file, offset, length, tensor.dtype, tuple(tensor.shape), tensor.stride(), self._writing)
        if place is not None:
            self._known[place] = put, _Memory(tensor)
        return put

    def settle(self) -> None:
        """Wait until what was put away is in the file."""
        writing, self._writing = self._writing, None
        if writing is not None and not writing.is_over():
            self._room = 0

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="nanscope-")  # noqa: SIM115 - open for as long as a tensor in it
            disk = os.fstatvfs(self._file.fileno())
            self._room = min(LIMIT, disk.f_bavail * disk.f_frsize // SPARE)
        return self._file


def give_back() -> None:
    """Give the memory of tensors that nobody holds back to the machine: the C library keeps it, in pieces into which no other one fits."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Glibc's `malloc_trim`; None where the C library is another one."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):
        return None
    return found


def _is_dense(tensor: Tensor) -> bool:
    """Does a tensor fill one stretch of memory, each place once, in whatever order of its dimensions?"""
    if tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Shelved(MutableMapping[int, Tensor]):
    """Tensors by id, the large ones on a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._held: dict[int, Tensor | Put] = {}

    def __getitem__(self, key: int) -> Tensor:
        return took(self._held[key])

    def __setitem__(self, key: int, tensor: Tensor) -> None:
        self._held[key] = self._shelf.put(tensor)

    def __delitem__(self, key: int) -> None:
        del self._held[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held


def took(held: Tensor | Put) -> Tensor:
    """Return the tensor that `Shelf.put` put away, or left as it was."""
    return held.take() if isinstance(held, Put) else held
