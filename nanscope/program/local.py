"""The one door through which a tensor of the trainer's is read: the part of it that this process holds, as a plain tensor.

A tensor may be more than the memory that is here. Whoever counts the NaN of a DTensor asks all ranks, and hangs if he is the only one to
ask; a jagged or a quantised tensor refuses most questions; that of a sharded model may have no memory at the moment. Nothing of ours is
ever computed on any of these: on its part in here, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Parameter

from nanscope.torch_inside import INSIDE, base_of, writes_counted

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@lru_cache(maxsize=256)
def is_wrapper(kind: type) -> bool:
    """Does a class answer calls on its tensors itself?"""
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


@lru_cache(maxsize=256)
def _inside(kind: type) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((INSIDE[name] for name in names if name in INSIDE), None)


@lru_cache(maxsize=256)
def _may_refuse(kind: type) -> bool:
    """Has somebody outside of torch made a class, who may have thought of questions that its tensors do not answer?"""
    return not is_wrapper(kind) and kind.__module__.partition(".")[0] != "torch"


_ASKED: tuple[Callable[[Tensor], object], ...] = (
    lambda t: (t.layout, t.is_nested, t.shape, t.dtype, t.device, t.requires_grad, t.is_leaf, t.grad, base_of(t)),
    lambda t: (t.data_ptr(), t.stride(), t.storage_offset(), t.untyped_storage(), t.numel(), t.element_size(), t.dim(), t.size()),
    lambda t: (t.is_inference(), t.is_floating_point(), t.is_complex(), t.is_meta, t.is_cpu, t.is_sparse, t.is_quantized),
)
_ASKED_IN_VAIN: tuple[Callable[[Tensor], object], ...] = (lambda t: t.grad_fn, writes_counted)  # torch itself may not answer these


def refuses(tensor: Tensor) -> bool:
    """Does a tensor of somebody's class raise where one of torch's answers? Then nothing can be known of it, and it is never asked."""
    if not _may_refuse(type(tensor)):
        return False
    try:
        for ask in _ASKED:
            ask(tensor)
        for ask in _ASKED_IN_VAIN:
            with contextlib.suppress(RuntimeError):
                ask(tensor)
    except Exception:  # noqa: BLE001 - whatever its class does
        return True
    return False


def is_plain(tensor: Tensor) -> bool:
    """Is a tensor memory and nothing else: no wrapper around others, not nested, not sparse, and of a class that answers?"""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter and (is_wrapper(kind) or refuses(tensor)):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def local(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor that this process holds, None if it cannot be read. Issues no collective, and has no gradient.

    What is an ordinary tensor without gradient is returned as it is: this is done twice to every gradient and weight of a step.
    """
    kind = type(tensor)
    if not ((kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested):  # what most are
        opened = tensor if is_plain(tensor) else _opened(tensor)
        if opened is None:
            return None
        tensor = opened
    if not has_memory(tensor):
        return None
    return tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()


def _opened(tensor: Tensor) -> Tensor | None:
    """The memory in here that a tensor stands for, None if that is not known."""
    if refuses(tensor):
        return None
    with torch.no_grad():
        return _values_of(unwrapped(tensor, wait=True))


def unwrapped(tensor: Tensor, wait: bool = False) -> Tensor | None:
    """Return the tensor inside all wrappers, None if one of them is unknown. wait: for what the trainer's own collective still writes."""
    while is_wrapper(type(tensor)):
        inside = _inside(type(tensor))
        if inside is None:
            return None
        if wait and inside == "elem":
            tensor.trigger_wait()  # type: ignore[attr-defined]
        tensor = getattr(tensor, inside)
    return tensor


def _values_of(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.is_nested or tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor if tensor.layout is torch.strided else None


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a part of, 0 if it has none of its own or no element."""
    try:
        pointer = tensor.data_ptr()
        return pointer - int(tensor.storage_offset()) * tensor.element_size() if pointer else 0
    except RuntimeError:  # a wrapper of some transform
        return 0


def has_memory(tensor: Tensor) -> bool:
    """May a tensor be read? A sharded model lets go of the memory of its weights between two uses; what is empty needs none. A view into
    what is gone has an address, too."""
    try:
        if tensor.data_ptr() and not tensor.storage_offset():
            return True
        return not tensor.numel() or (bool(tensor.untyped_storage().nbytes()) and not tensor.is_meta)
    except RuntimeError:  # a wrapper of some transform
        return False


def unreadable(tensors: Iterable[Tensor]) -> list[str]:
    """Return the classes of the tensors that cannot be read, each once."""
    return sorted({type(tensor).__qualname__ for tensor in tensors if local(tensor) is None})
