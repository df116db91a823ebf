"""The account of what nanscope holds of the trainer's tensors: one budget for all that hold some.

Memory counts as a whole and once, however many hold a part of it: a view keeps alive all that it is a view of. What the trainer or
autograd holds anyway is counted, too: who will let go first is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Account:
    """Bytes that are held by reference, never more than `budget`. held: now. peak: the most so far.

    spare: lets go of what is least needed, False if there is nothing.
    """

    __slots__ = ("_pieces", "budget", "held", "peak", "spare")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = self.peak = 0
        self.spare: Callable[[], bool] = lambda: False
        self._pieces: dict[int, list[int]] = {}  # address → how many hold it, bytes

    def knows(self, address: int) -> bool:
        """Is this memory held already?"""
        return address in self._pieces

    def fits(self, size: int) -> bool:
        """Is there room for so many bytes, if need be after something else was let go of?"""
        while self.held + size > self.budget:
            if size > self.budget or not self.spare():
                return False
        return True

    def take(self, address: int, size: int) -> None:
        """Count a holder of a piece of memory. size: all of it, in bytes."""
        piece = self._pieces.get(address)
        if piece is not None:
            piece[0] += 1
            return
        self._pieces[address] = [1, size]
        self.held += size
        if self.held > self.peak:
            self.peak = self.held

    def give(self, address: int) -> None:
        """Count a holder out; the last one takes the memory off the account."""
        piece = self._pieces[address]
        piece[0] -= 1
        if not piece[0]:
            self.held -= piece[1]
            del self._pieces[address]


class Holding:
    """What one holder has on the account. Whoever made it lets go of the tensors when he lets go of this."""

    __slots__ = ("_account", "_addresses")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._addresses: list[int] = []

    def add(self, tensors: Iterable[Tensor]) -> bool:
        """Count tensors in, all of them or none: False if there is no room."""
        new = [piece for tensor in tensors for piece in pieces(tensor)]
        size = sum(dict(piece for piece in new if not self._account.knows(piece[0])).values())
        if not self._account.fits(size):
            return False
        for piece in new:
            self._account.take(*piece)
            self._addresses.append(piece[0])
        return True

    def close(self) -> None:
        """Count everything out."""
        for address in self._addresses:
            self._account.give(address)
        self._addresses.clear()


def pieces(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the memory that a tensor keeps alive, as address and bytes: several for a wrapper of others, such as a shard."""
    if isinstance(tensor, torch.nn.Parameter):
        return []  # there anyway
    parts = [tensor]
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [part for name in tensor.__tensor_flatten__()[0] if isinstance(part := getattr(tensor, name), Tensor)]
    elif tensor.layout is not torch.strided:
        parts = [tensor.detach().coalesce().values()] if tensor.layout is torch.sparse_coo else []
    found = []
    for part in parts:
        storage = part.untyped_storage()
        if pointer := storage.data_ptr():
            found.append((pointer, storage.nbytes()))
    return found
