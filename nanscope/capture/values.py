"""What the tape knows of values: which tensor is which, how much memory is held for them, and who made them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor

from nanscope.capture.account import Balance
from nanscope.capture.entries import PLAIN, Handle, Key, Unseen, Value, history_of
from nanscope.capture.modules import version_of
from nanscope.program.local import is_plain, memory_of, refuses
from nanscope.torch_inside import base_of, references, uses

Lying = tuple[int, tuple[int, ...], tuple[int, ...]]  # address, shape, strides

CONJUGATE = -1  # stands behind the strides of what is to be read as its conjugate
OURS = 3  # references to a tensor that nobody else holds: that of its value, and two while they are counted


class Fleeting:
    """What a call has made of no tensor, and nobody here holds: torch hands out a copy if somebody does. identity: of the tensor, as long
    as that is there."""

    __slots__ = ("bytes", "handle", "identity", "key", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.identity, self.key, self.handle = id(tensor), key_of(tensor, PLAIN), Handle(tensor)
        self.storage, self.bytes = memory_of(tensor), tensor.nbytes


class Values:
    """All values that are known, found by the memory that a tensor lies in and the history that its gradient takes.

    account: of what is held by reference. limits: bytes that a single tensor may take of it, an eighth of its budget, and that one of three
    dimensions and more may, wide, by default the same. evict: makes room for a value, by its id, and so many bytes; False if there is none.
    away: results for which there is no room, or no longer; they are found again while somebody else holds them. comes_again: can one of
    these be made again?
    """

    def __init__(self, account: Balance, wide: int | None) -> None:
        self.account = account
        self.length = 0  # values numbered so far
        self.by_id: dict[int, Value] = {}
        self.by_key: dict[Key, int] = {}
        self.by_storage: dict[int, list[int]] = {}  # address → values that are, or hold, what lies there now
        self.made_by: dict[int, int] = {}  # value → number of the call
        self.nameless: set[int] = set()  # leaves that no recorded call has read so far, or none that is still known
        self.away: set[int] = set()
        self.evict: Callable[[int, int], bool] = lambda value, size: False
        self.comes_again: Callable[[Value], bool] = lambda value: True
        self.just_made: dict[int, Value] = {}  # by identity: it may lie otherwise by now, or somewhere else
        self.gradients: Callable[[], Iterable[Tensor]] = tuple  # of the models that are trained
        largest = account.budget // 8
        self.limits = largest, largest if wide is None else wide
        self._owners: dict[int, int] = {}  # history that views seem to have → the one that they have, by whoever was seen first
        self._mixed: set[int] = set()  # seeming histories of several owners: there only the tensor itself tells

    def find(self, tensor: Tensor, history: int | None = None, version: int | None = None) -> Value | None:
        """Return what the tape knows of a tensor, None if it never saw it or something else has written to it since.

        history, version: what these were when it was read, by default what they are.
        """
        if history is None:
            history = PLAIN if type(tensor) is not Tensor and refuses(tensor) else history_of(tensor)
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
        held = value.tensor
        if held is not None and held is not tensor and not value.copied and held.data_ptr() != key[0]:
            return None  # it was given other memory, as by `x.data = y`, and this is somebody else in what it has left
        version = version_of(tensor) if version is None else version
        if value.version is None:
            value.version = version
        if value.version != version:
            return None  # something wrote to it, and we did not see what
        if value.tensor is None and (not value.bytes or (value.id in self.away and not value.diff)):
            value.bytes = tensor.numel() * tensor.element_size()
            self.away.add(value.id)
            if self.hold(value, tensor):  # so far only writes to its memory had told us of it, or there was no room
                value.guard = None
            elif not self.comes_again(value):
                return None  # as a leaf it is worth more room
        return value

    def at(self, tensor: Tensor) -> Value | None:
        """Return what was known of a tensor before it was written to, if it was."""
        return self.by_id.get(self.by_key.get(key_of(tensor, history_of(tensor)), -1)) if is_plain(tensor) else None

    def hold(self, value: Value, tensor: Tensor) -> bool:
        """Keep a tensor by reference, if the memory that it is a part of is within the budget; what is oldest makes room."""
        account, size = self.account, 0
        if not account.knows(value.storage):
            size = tensor.untyped_storage().nbytes()
            if size > self.limits[tensor.dim() > 2]:
                account.short = account.short or tensor.dim() <= 2  # what is over a vocabulary is not to be held
                return False
            if account.held + size > account.budget and not self._make_room(value, size):
                return False
        account.take(value.storage, size)
        value.tensor = tensor
        self.away.discard(value.id)
        return True

    def resolved(self, tensor: Tensor) -> Value | None:
        """Return the value for which this very tensor stands, which was taken to have a gradient and has none: torch has written a
        conjugate out for the kernel alone, and the gradient goes another way. None if it is no such thing."""
        if not tensor.is_complex() or tensor.requires_grad or not is_plain(tensor):
            return None
        value = self.by_id.get(self.by_key.get(key_of(tensor, id(tensor)), -1))
        if value is None or value.tensor is not tensor or value.id != self.length - 1:
            return None
        self.rehistory([value.id], PLAIN)
        return value

    def held_as(self, tensor: Tensor) -> Value | None:
        """Return the value without gradient for which this very tensor stands, None if there is none."""
        value = self.by_id.get(self.by_key.get(key_of(tensor, PLAIN), -1)) if is_plain(tensor) else None
        same = value is not None and (value.tensor is tensor or (value.guard is not None and value.guard.is_of(tensor)))
        return value if same else None

    def hold_instead(self, value: Value, tensor: Tensor) -> None:
        """Take a tensor for that of a value: it lies in the same memory, and is what the trainer is given."""
        if value.tensor is None:
            value.guard = Handle(tensor)
        else:
            value.tensor = tensor

    def _make_room(self, value: Value, size: int) -> bool:
        """Let go of what is over, of what is oldest, and for a leaf of results: they can be made again from their leaves, a leaf cannot."""
        account = self.account
        if account.fits(size):
            return True
        while account.held + size > account.budget and self.evict(value.id, size):
            pass
        for other in self._making_room(value):
            if account.held + size <= account.budget:
                break
            self.release(other, guarded=True)
        return account.held + size <= account.budget

    def _making_room(self, value: Value) -> Iterator[Value]:
        """Yield the results that go for a leaf, and those with a gradient that go for what is read again: of what the loss has read these
        can be made again."""
        is_result = value.id in self.made_by
        if is_result and value.id not in self.away:
            return
        known = (self.by_id.get(made) for made in list(self.made_by))
        results = [other for other in known if other is not None and other.tensor is not None and not other.copied]
        yield from (other for other in results if other.diff)
        if not is_result:
            yield from (other for other in results if not other.diff)

    def release(self, value: Value, guarded: bool = False) -> None:
        """Let go of a tensor. guarded: it may be found again, as long as somebody else holds it."""
        if value.tensor is None:
            return
        if guarded:
            value.guard = Handle(value.tensor)
            self.away.add(value.id)
        self.account.give(memory_of(value.tensor) if value.copied else value.storage)
        value.tensor = None

    def keep_copy(self, value: Value, copy: Callable[[], Tensor]) -> None:
        """Hold a copy of what a write is about to destroy, if there is room for it."""
        size = value.bytes
        if self.account.held + size <= self.account.budget or self._make_room(value, size):
            value.tensor, value.copied = copy(), True
            self.account.take(memory_of(value.tensor), value.tensor.untyped_storage().nbytes())

    def is_wanted(self, value: Value, besides: int = 0) -> bool:
        """May somebody else come back with the tensor of this value? besides: references to it that are of no account."""
        if value.copied or (self.by_key.get(value.key) != value.id and value.history not in self._mixed):
            return False
        tensor = value.tensor
        if tensor is None:
            return value.guard is not None and not value.guard.gone()
        return references(tensor) > OURS + besides or uses(tensor) > 1

    def is_saved(self, value: Value, besides: int = 0) -> bool:
        """Is a tensor out of the reach of Python, and only saved by a graph for its backward pass? That counts as one reference."""
        tensor = value.tensor
        return tensor is not None and references(tensor) == OURS + 1 + besides and uses(tensor) > 1

    def of_gradients(self) -> set[int]:
        """Return where the gradients of weights lie. A weight holds its own as a graph would, and an optimizer comes back for it."""
        return {grad.data_ptr() for grad in self.gradients() if is_plain(grad)}

    def register(
        self, tensor: Tensor, made: int, diff: bool, view: bool | None, read: list[int], writes: int, lay: Lying | None = None
    ) -> Value:
        """Number a result of a call: autograd gives it its history and its version only after that.

        made: number of the call. diff: it has a gradient. view: is it one to autograd? None if it was written in place. read: by the call.
        writes: how often it had been written to when the call was over. lay: where it lay then, and how, if it may lie otherwise by now.
        """
        pointer = memory_of(tensor)
        history, version = self._will_be(tensor, pointer, diff, view, read, writes)
        self.made_by[self.length] = made
        # torch hands out a copy of what a factory made if somebody else holds it, and a mode of the trainer's would see that being made
        key = key_of(tensor, history)
        if lay is not None and key[1:3] != lay[1:]:
            key = (*lay, key[3], history)
        value = self._number(tensor, key, version, pointer, hold=bool(read))
        if lay is not None:
            self.just_made[id(tensor)] = value
        return value

    def register_fleeting(self, made_of_nothing: Fleeting, made: int, version: int) -> Value:
        """Number what a call has made of no tensor. made: number of the call. version: how often it had been written to then."""
        one, key = made_of_nothing, made_of_nothing.key
        self.made_by[self.length] = made
        value = Value(self.length, key, None, one.bytes, version, one.storage, False, key[1], key[3], guard=one.handle)
        self._add(value)
        if not one.handle.gone():
            self.just_made[one.identity] = value
        return value

    def leaf(self, tensor: Tensor, was: tuple[int, int] | None = None) -> Value:
        """Number a tensor that comes from outside. was: its history and its version, if these may be others by now."""
        history, version = was or (history_of(tensor), version_of(tensor))
        value = self._number(tensor, key_of(tensor, history), version, memory_of(tensor))
        self.nameless.add(value.id)
        base = base_of(tensor)
        if base is not None and value.history == id(tensor):
            value.alien = id(base)
            self._owners.setdefault(id(base), id(base) if base.requires_grad else value.history)
        return value

    def _number(self, tensor: Tensor, key: Key, version: int | None, pointer: int, hold: bool = True) -> Value:
        value = Value(self.length, key, None, tensor.numel() * key[3].itemsize, version, pointer, key[4] != PLAIN, key[1], key[3])
        if not (hold and self.hold(value, tensor)):
            value.guard = Handle(tensor)
            if hold and value.id in self.made_by:
                self.away.add(value.id)
        self._add(value)
        return value

    def _add(self, value: Value) -> None:
        self.length = value.id + 1
        self.by_id[value.id] = value
        self.by_key[value.key] = value.id
        self.by_storage.setdefault(value.storage, []).append(value.id)

    def _will_be(self, item: Tensor, pointer: int, diff: bool, view: bool | None, read: list[int], writes: int) -> tuple[int, int | None]:
        """Return the history and the version that a result will have."""
        diff = diff and (item.is_floating_point() or item.is_complex())
        if view is None:
            whole = base_of(item)
            return (id(item if whole is None else whole) if diff else PLAIN), writes
        for value_id in read:
            base = self.by_id.get(value_id)
            # it counts its writes with its base, and so does a view of no element, which lies nowhere
            if base is not None and (base.storage == pointer if item.numel() else view):
                version = base.version if view else writes  # what autograd takes for no view counts its own writes
                if not diff:
                    return PLAIN, version
                if not view or not base.diff:
                    return id(item), version
                if base.alien and self._owners.setdefault(base.alien, base.history) != base.history:
                    self._mixed.add(base.alien)
                return base.alien or base.history, base.version
        return (id(item) if diff else PLAIN), writes

    def rehistory(self, values: Iterable[int | None], history: int) -> None:
        """What was just numbered has another history than can be seen of it so far."""
        for one in values:
            value = self.by_id.get(one) if one is not None else None
            if value is not None:
                self.by_key.pop(value.key, None)
                value.key = (*value.key[:4], history)
                self.by_key[value.key] = value.id

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
        value = Value(self.length, key, None, 0, version, like.storage, history != PLAIN, like.shape, like.dtype, guard=like.guard)
        self._add(value)
        return value

    def unfind(self, tensors: Iterable[Tensor]) -> None:
        """Whoever shares memory with these tensors becomes a leaf when it is read next, with the content that it has then."""
        for tensor in tensors:
            if is_plain(tensor) and (storage := memory_of(tensor)) in self.by_storage:
                self.supersede(storage)

    def supersede(self, storage: int, but: Collection[int] = ()) -> None:
        """Nobody in this memory is any more what he was. What is known of them stays: calls have read it. but: ids of those who are."""
        for value in self.relatives(storage):
            if value.id in but:
                continue
            self.by_key.pop(value.key, None)
            if not value.copied:
                self.release(value)
        left = [value for value in self.by_storage.pop(storage, ()) if value in but]
        if left:
            self.by_storage[storage] = left

    def drop(self, value_id: int) -> None:
        """Forget a value."""
        value = self.by_id.pop(value_id, None)
        if value is None:
            return
        self.nameless.discard(value_id)
        self.away.discard(value_id)
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
        for value in self.by_id.values():
            self.release(value)
        for known in (self.by_id, self.by_key, self.by_storage, self.made_by, self.nameless, self.away):
            known.clear()

    def drop_strays(self, named: Collection[int], over: bool) -> None:
        """Forget leaves that no call reads and nobody else holds. named: those that have a tag. over: those with a gradient as well."""
        for value_id in [i for i in self.nameless if i not in named]:
            value = self.by_id[value_id]
            if (over and value.diff) or not self.is_wanted(value):
                self.drop(value_id)

    def forget_histories(self, over: bool) -> None:
        """The tensors whose identities are histories may be gone. over: all of them, at the end of a backward pass."""
        known = set() if over else {value.alien for value in self.by_id.values()}
        self._owners = {alien: history for alien, history in self._owners.items() if alien in known}
        self._mixed &= known


def key_of(tensor: Tensor, history: int) -> Key:
    """Return what a value is found by. Raises Unseen for what has no plain memory of its own."""
    if not is_plain(tensor):
        raise Unseen
    try:
        if tensor.is_conj():  # it is another value in the same memory
            return (tensor.data_ptr(), tensor.shape, (*tensor.stride(), CONJUGATE), tensor.dtype, history)
        return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, history)
    except RuntimeError:
        raise Unseen from None  # no memory of its own: a wrapper of some transform
