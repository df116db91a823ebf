"""The shelf: what was put away comes back bit for bit, in the layout it had, and a full disk loses nothing."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanscope.program.shelf import Put, Shelf, Shelved, took

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.complex64]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Any dtype, with NaN payloads, in the same strides."""
    tensor = torch.randint(0, 255, (3, 5, 16), dtype=torch.uint8).view(torch.uint8)
    tensor = (tensor % 2).bool() if dtype is torch.bool else tensor.view(dtype) if dtype.itemsize <= 16 else tensor
    put = Shelf(least=1).put(tensor)
    assert isinstance(put, Put)
    back = put.take()
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bits(back) == bits(tensor)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_layout_is_kept(shape: list[int], random: object) -> None:
    """A permuted tensor comes back permuted: sums over it are added up in the same order."""
    tensor = torch.rand(shape)
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = tensor.permute(order)
    back = took(Shelf(least=1).put(tensor))
    assert torch.equal(back, tensor) and back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6)[:, ::2],
        torch.rand(4, 1).expand(4, 5),
        torch.rand(10)[2:5],
        torch.rand(0, 3),
        torch.rand(2, 2, dtype=torch.complex64).conj(),
    ],
    ids=["holes", "expanded", "part", "empty", "conjugated"],
)
def test_what_does_not_fill_its_memory_is_held_or_comes_back_the_same(tensor: Tensor) -> None:
    """Strides with holes or overlaps are not written; the value is the same either way."""
    back = took(Shelf(least=1).put(tensor))
    assert torch.equal(back, tensor) and back.stride() == tensor.stride()


def test_a_small_tensor_stays_where_it_is() -> None:
    """Files are for what is large."""
    tensor = torch.rand(8, requires_grad=True)
    held = Shelf(least=33).put(tensor)
    assert isinstance(held, Tensor) and held.data_ptr() == tensor.data_ptr() and not held.requires_grad
    assert isinstance(Shelf(least=32).put(tensor), Put)


def test_several_tensors_share_a_file_that_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind, whatever happens to the process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = Shelved(Shelf(least=1))
    for key in range(5):
        held[key] = torch.full((1000 + key,), float(key))
    assert list(tmp_path.iterdir()) == []
    assert all(bool((held[key] == key).all()) and held[key].numel() == 1000 + key for key in range(5))
    del held[3]
    assert list(held) == [0, 1, 2, 4] and len(held) == 4 and 3 not in held


def test_a_change_stays_with_the_tensor() -> None:
    """What is taken is a copy as far as writing goes."""
    put = Shelf(least=1).put(torch.zeros(2000))
    first = took(put)
    first += 1
    assert bool((took(put) == 0).all())


def test_a_full_disk_keeps_tensors_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value is lost, and nobody hears of it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    shelf = Shelf(least=1)
    first = shelf.put(torch.ones(100))
    shelf.settle()
    monkeypatch.setattr(os, "pwrite", full)
    second, third = (shelf.put(torch.full((100,), math.pi)) for _ in range(2))
    assert isinstance(first, Put) and isinstance(third, Tensor)  # of the second nobody knows so far
    assert bool((took(first) == 1).all()) and all(bool((took(put) == torch.tensor(math.pi)).all()) for put in (second, third))


def test_a_shelf_takes_a_part_of_the_disk_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit tensors stay in memory."""
    monkeypatch.setattr("nanscope.program.shelf.LIMIT", 1 << 16)
    shelf = Shelf(least=1)
    held = [shelf.put(torch.ones(4096)) for _ in range(8)]
    assert sum(isinstance(put, Put) for put in held) == 4
    assert all(bool((took(put) == 1).all()) for put in held)


def test_what_is_put_away_twice_is_written_once() -> None:
    """Autograd saves what a call has made, and hands one gradient to several hooks; what was written to since is another tensor."""
    shelf, tensor = Shelf(least=1), torch.rand(64, 64)
    first = shelf.put(tensor)
    assert shelf.put(tensor) is first and shelf.put(tensor.detach()) is first
    assert shelf.put(tensor.t()) is not first and torch.equal(took(shelf.put(tensor.t())), tensor.t())
    before = tensor.clone()
    shelf.settle()
    tensor.add_(1)
    second = shelf.put(tensor)
    assert second is not first and torch.equal(took(first), before) and torch.equal(took(second), tensor)


def test_what_lies_where_another_tensor_was_is_not_taken_for_it() -> None:
    """Memory is used again, often at once."""
    shelf = Shelf(least=1)
    held = [(shelf.put(torch.full((512, 64), float(n))), float(n)) for n in range(50)]
    assert all(bool((took(put) == value).all()) for put, value in held)


def test_in_inference_mode_nothing_counts_writes() -> None:
    """What cannot be told apart is written anew."""
    shelf = Shelf(least=1)
    with torch.inference_mode():
        tensor = torch.zeros(64, 64)
        first = shelf.put(tensor)
        shelf.settle()
        tensor += 1
        assert bool((took(shelf.put(tensor)) == 1).all()) and bool((took(first) == 0).all())


def test_a_tensor_stays_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes it waits for that; it is gone with whoever held it, and the file that it goes into is not."""
    slow, written, original = threading.Event(), list[int](), os.pwrite

    def late(file: int, data: memoryview, offset: int) -> int:
        assert slow.wait(60)
        written.append(os.fstat(file).st_nlink)
        return original(file, data, offset)

    monkeypatch.setattr(os, "pwrite", late)
    shelf = Shelf(least=1)
    put = shelf.put(torch.arange(5000.0))
    threading.Timer(0.05, slow.set).start()
    assert not written and torch.equal(took(put), torch.arange(5000.0)) and written == [0]
    slow.clear()
    shelf.put(torch.arange(4000.0))
    del shelf, put
    slow.set()
    deadline = time.monotonic() + 60
    while len(written) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert written == [0, 0]


def test_without_another_thread_it_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is about to end starts none."""

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    put = Shelf(least=1).put(torch.arange(5000.0))
    assert isinstance(put, Put) and torch.equal(put.take(), torch.arange(5000.0))
