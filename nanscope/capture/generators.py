"""Generators that a model is given, or that it holds: where they stood when it was called, so that what is run again draws the same.

noisy = logits + torch.rand(logits.shape, generator=generator)     in a forward that was given `generator`, or finds it in `self`
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

DEEP = 3  # containers, or objects, that are looked into

Path = tuple[ref[nn.Module], tuple[str, ...]]  # a part of a model, and the attributes that lead from there


@dataclass(frozen=True, slots=True)
class Drawn:
    """A generator, and where it stood."""

    generator: Any
    state: Any


# class → how to ask one where it stands, and how to set it
_KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "torch._C.Generator": (torch.Generator.get_state, torch.Generator.set_state),
    "random.Random": (random.Random.getstate, random.Random.setstate),
    "numpy.random._generator.Generator": (
        lambda generator: generator.bit_generator.state,  # numpy puts it together anew whenever it is asked
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
    "numpy.random.mtrand.RandomState": (lambda generator: generator.get_state(), lambda generator, state: generator.set_state(state)),
}


_NOT_LOOKED_INTO = (Tensor, nn.Module, int, float, str, dict, list, tuple, type, FunctionType, MethodType, ModuleType)


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def is_generator(thing: object) -> bool:
    """Is it one whose state can be asked for?"""
    return not issubclass(type(thing), Tensor) and _kind(thing) in _KINDS


def twin_of(generator: Any) -> Any:
    """Return another one that stands where it does."""
    return generator.clone_state() if isinstance(generator, torch.Generator) else deepcopy(generator)


def set_back(generator: Any, state: Any) -> None:
    """Let a generator draw again from where it, or the one that it is a twin of, stood."""
    _KINDS[_kind(generator)][1](generator, state)


def standing(generators: Iterable[Any]) -> tuple[Drawn, ...]:
    """Return where generators stand."""
    return tuple(Drawn(one, _KINDS[_kind(one)][0](one)) for one in generators)


def given(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the generators among arguments."""
    if isinstance(tree, (tuple, list)) and depth < DEEP:
        for item in tree:
            yield from given(item, depth + 1)
    elif isinstance(tree, dict) and depth < DEEP:
        yield from given(tuple(tree.values()), depth)
    elif is_generator(tree):
        yield tree


def paths_in(model: nn.Module) -> tuple[Path, ...]:
    """Return what leads to the generators that the parts of a model hold, at most in an object of theirs."""
    return tuple((ref(part), path) for part in model.modules() for path in _paths(vars(part)))


def _paths(attributes: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, ...]]:
    for name, value in attributes.items():
        if is_generator(value):
            yield (name,)
        elif depth == 0 and not issubclass(type(value), _NOT_LOOKED_INTO):
            with contextlib.suppress(AttributeError):  # what stands for another object is not asked for that
                yield from ((name, *rest) for rest in _paths(object.__getattribute__(value, "__dict__"), 1))


def held(paths: Sequence[Path]) -> Iterator[Any]:
    """Yield the generators that paths lead to now."""
    for owner, names in paths:
        found: Any = owner()
        for name in names:
            found = getattr(found, name, None)
        if is_generator(found):
            yield found
