"""The account of what nanscope holds of the trainer's tensors: one budget for all that hold some.

Memory counts as a whole and once, however many hold a part of it: a view keeps alive all that it is a view of. What the trainer or
autograd holds anyway is counted, too: who will let go first is not known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Balance:
    """Bytes that are held by reference, never more than `budget`. held: now. peak: the most so far.

    spare: lets go of what is least needed, False if there is nothing. short: there was no room for something that a larger one would have.
    """

    __slots__ = ("_pieces", "budget", "held", "peak", "short", "spare")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held = self.peak = 0
        self.short = False
        self.spare: Callable[[], bool] = lambda: False
        self._pieces: dict[int, list[int]] = {}  # address → how many hold it, bytes

    def knows(self, address: int) -> bool:
        """Is this memory held already?"""
        return address in self._pieces

    def fits(self, size: int) -> bool:
        """Is there room for so many bytes, if need be after something else was let go of?"""
        while self.held + size > self.budget:
            if size > self.budget or not self.spare():
                self.short = True
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

    def __init__(self, account: Balance) -> None:
        self._account = account
        self._addresses: list[int] = []

    def add(self, *tensors: Tensor, needed: bool = False) -> bool:
        """Count tensors in, all of them or none: False if there is no room. needed: room or not."""
        account = self._account
        new = [piece for tensor in tensors for piece in _pieces(tensor, account.budget)]
        if not needed and not account.fits(sum({address: size for address, size in new if not account.knows(address)}.values())):
            return False
        for piece in new:
            account.take(*piece)
            self._addresses.append(piece[0])
        return True

    def close(self) -> None:
        """Count everything out."""
        for address in self._addresses:
            self._account.give(address)
        self._addresses.clear()


def _pieces(tensor: Tensor, budget: int) -> list[tuple[int, int]]:
    """Return the memory that a tensor keeps alive, as address and bytes.

    A part of something larger than the whole budget counts as the part: a data set that lies in memory is not made anew for each call.
    """
    if type(tensor) is not Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            return []  # there anyway
        inner = getattr(tensor, "__tensor_flatten__", None)
        if inner is not None:  # a wrapper of others, such as a shard
            return [piece for name in inner()[0] if isinstance(part := getattr(tensor, name), Tensor) for piece in _pieces(part, budget)]
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.data_ptr():
        return []
    storage = tensor.untyped_storage()
    whole = storage.nbytes()
    return [(storage.data_ptr(), whole)] if whole <= budget else [(tensor.data_ptr(), tensor.nbytes)]
