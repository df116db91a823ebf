"""What the tape knows of values: which tensor is which, how much memory is held for them, and who made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nanscope.capture.entries import PLAIN, Handle, Key, Unseen, Value, history_of, memory_of, next_version, version_of


class Values:
    """All values that are known, found by the memory that a tensor lies in and the history that its gradient takes.

    budget: bytes of tensors that may be held by reference. `held` says how many are. A single one may take an eighth of it. wide: bytes
    of a single one of three dimensions and more, by default the same. evict: makes room for a value, by its id; False if there is none.
    """

    def __init__(self, budget: int, wide: int | None) -> None:
        self.budget = budget
        self.held = 0
        self.length = 0  # values numbered so far
        self.by_id: dict[int, Value] = {}
        self.by_key: dict[Key, int] = {}
        self.by_storage: dict[int, list[int]] = {}
        self.made_by: dict[int, int] = {}  # value → number of the call
        self.nameless: set[int] = set()  # leaves that no recorded call has read so far
        self.evict: Callable[[int], bool] = lambda value: False
        self._largest = budget // 8
        self._wide = self._largest if wide is None else wide
        self._storages: dict[int, list[int]] = {}  # address → values that hold it, bytes
        self._owners: dict[int, int] = {}  # history that views seem to have → the one that they have, by whoever was seen first
        self._mixed: set[int] = set()  # seeming histories of several owners: there only the tensor itself tells

    def find(self, tensor: Tensor) -> Value | None:
        """Return what the tape knows of a tensor, None if it never saw it or something else has written to it since."""
        history = history_of(tensor)
        key = key_of(tensor, history)
        found = self.by_key.get(key)
        if found is None:
            return None
        value: Value | None = self.by_id[found]
        assert value is not None
        if history in self._mixed and value.tensor is not tensor:
            same = (self.by_id[i] for i in self.by_storage.get(value.storage, ()))
            value = next((v for v in same if v.tensor is tensor and v.key == key), None)
            if value is None:
                return None
        if value.guard is not None and value.guard.expired():
            return None
        version = version_of(tensor)
        if value.version is None:
            value.version = version
        if value.version != version:
            return None  # something wrote to it, and we did not see what
        if value.tensor is None and value.guard is None and not value.bytes:
            value.bytes = tensor.numel() * tensor.element_size()
            self.hold(value, tensor)  # so far only writes to its memory had told us of it
        return value

    def hold(self, value: Value, tensor: Tensor) -> bool:
        """Keep a tensor by reference, if the memory that it is a part of is within the budget; what is oldest makes room."""
        known = self._storages.get(value.storage)
        if known is None:
            size = tensor.untyped_storage().nbytes()
            if size > (self._wide if tensor.dim() > 2 else self._largest):
                return False
            while self.held + size > self.budget and self.evict(value.id):
                pass
            if self.held + size > self.budget and value.id not in self.made_by:
                self._make_room(size)
            if self.held + size > self.budget:
                return False
            known = self._storages[value.storage] = [0, size]
            self.held += size
        known[0] += 1
        value.tensor = tensor
        return True

    def _make_room(self, size: int) -> None:
        """Let go of results until a leaf fits: they can be made again from their leaves, a leaf cannot."""
        for value_id in self.made_by:
            value = self.by_id.get(value_id)
            if value is not None and value.tensor is not None and not value.copied:
                value.guard = Handle(value.tensor)
                self.release(value)
                if self.held + size <= self.budget:
                    return

    def release(self, value: Value) -> None:
        """Let go of a tensor; its memory is off the account when nobody else here holds a part of it."""
        if value.tensor is None:
            return
        value.tensor = None
        if value.copied:
            self.held -= value.bytes
            return
        known = self._storages[value.storage]
        known[0] -= 1
        if not known[0]:
            self.held -= known[1]
            del self._storages[value.storage]

    def register(self, tensor: Tensor, made: int, diff: bool, view: bool | None, read: list[int]) -> Value:
        """Number a result of a call: autograd gives it its history and its version only after that.

        made: number of the call. diff: it has a gradient. view: is it one to autograd? None if it was written in place. read: by the call.
        """
        pointer = memory_of(tensor)
        history, version = self._will_be(tensor, pointer, diff, view, read)
        self.made_by[self.length] = made
        return self._number(tensor, history, version, pointer)

    def leaf(self, tensor: Tensor) -> Value:
        """Number a tensor that comes from outside."""
        value = self._number(tensor, history_of(tensor), version_of(tensor), memory_of(tensor))
        self.nameless.add(value.id)
        base = tensor._base
        if base is not None and value.history == id(tensor):
            value.alien = id(base)
            self._owners.setdefault(id(base), id(base) if base.requires_grad else value.history)
        return value

    def _number(self, tensor: Tensor, history: int, version: int | None, pointer: int) -> Value:
        key = key_of(tensor, history)
        value = Value(self.length, key, None, tensor.numel() * key[3].itemsize, version, pointer, history != PLAIN, key[1], key[3])
        self.length += 1
        if not self.hold(value, tensor):
            value.guard = Handle(tensor)
        self.by_id[value.id] = value
        self.by_key[key] = value.id
        self.by_storage.setdefault(pointer, []).append(value.id)
        return value

    def _will_be(self, item: Tensor, pointer: int, diff: bool, view: bool | None, read: list[int]) -> tuple[int, int | None]:
        """Return the history and the version that a result will have."""
        diff = diff and (item.is_floating_point() or item.is_complex())
        if view is None:
            return (id(item if item._base is None else item._base) if diff else PLAIN), next_version(item)
        for value_id in read:
            base = self.by_id.get(value_id)
            if base is not None and base.storage == pointer and item.numel():  # it counts its writes with its base
                if not diff:
                    return PLAIN, base.version
                if not view or not base.diff:
                    return id(item), base.version
                if base.alien and self._owners.setdefault(base.alien, base.history) != base.history:
                    self._mixed.add(base.alien)
                return base.alien or base.history, base.version
        return (id(item) if diff else PLAIN), version_of(item)

    def relatives(self, storage: int) -> list[Value]:
        """Return the values that lie in a piece of memory."""
        by_id = self.by_id
        return [by_id[i] for i in self.by_storage.get(storage, ()) if i in by_id]

    def add(self, shape: tuple[int, ...], dtype: torch.dtype, diff: bool) -> Value:
        """Number a value that no tensor of the trainer's stands for."""
        value = Value(self.length, (0, (), (), dtype, PLAIN), None, 0, None, -1, diff, shape, dtype)
        self.length += 1
        self.by_id[value.id] = value
        return value

    def add_like(self, like: Value, history: int, version: int | None) -> Value:
        """Number what a value has become in its memory by a write to another one; its tensor is held when it is next seen."""
        key: Key = (*like.key[:4], history)
        value = Value(self.length, key, None, 0, version, like.storage, history != PLAIN, like.shape, like.dtype)
        self.length += 1
        self.by_id[value.id] = value
        self.by_key[key] = value.id
        self.by_storage.setdefault(like.storage, []).append(value.id)
        return value

    def unfind(self, tensors: Iterator[Tensor]) -> None:
        """Whoever shares memory with these tensors becomes a leaf when it is read next, with the content that it has then."""
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_nested:
                for value in self.relatives(tensor.untyped_storage().data_ptr()):
                    self.by_key.pop(value.key, None)
                    self.release(value)

    def drop(self, value_id: int) -> None:
        """Forget a value."""
        value = self.by_id.pop(value_id, None)
        if value is None:
            return
        self.nameless.discard(value_id)
        self.made_by.pop(value_id, None)
        if self.by_key.get(value.key) == value_id:
            del self.by_key[value.key]
        relatives = self.by_storage.get(value.storage)
        if relatives is not None:
            if value_id in relatives:
                relatives.remove(value_id)
            if not relatives:
                del self.by_storage[value.storage]
        self.release(value)

    def drop_all(self) -> None:
        """Forget everything."""
        for known in (self.by_id, self.by_key, self.by_storage, self.made_by, self._storages, self.nameless):
            known.clear()
        self.held = 0

    def forget_histories(self) -> None:
        """The tensors whose identities are histories may be gone."""
        self._owners.clear()
        self._mixed.clear()


def key_of(tensor: Tensor, history: int) -> Key:
    """Return what a value is found by. Raises Unseen for what has no plain memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or type(tensor).__module__.startswith("torch._subclasses"):
        raise Unseen
    try:
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, history)
    except RuntimeError:
        raise Unseen from None  # no memory of its own: a wrapper of some transform
