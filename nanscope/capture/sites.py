"""Where in the trainer's code a call is made, and what is seen of the framework's loss functions on the way there."""

from __future__ import annotations

import logging
import opcode
import sys
import sysconfig
from enum import IntEnum
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor

from nanscope.capture.account import Balance, Holding
from nanscope.capture.entries import Taken
from nanscope.capture.modules import place_of, version_of
from nanscope.capture.source import is_open, variables
from nanscope.errors import words_of
from nanscope.frameworks.live import Glimpse, follow, glimpse
from nanscope.frameworks.rows import LossSite
from nanscope.frameworks.table import site_in
from nanscope.program.local import is_plain, local
from nanscope.roles import Role

log = logging.getLogger("nanscope")

KNOWN = 1 << 14  # functions that are remembered as the trainer's or not

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_BENCH = str(Path(_OURS, "bench", ""))
_LIBRARY = sysconfig.get_path("stdlib")


HANDLERS = frozenset({"__torch_dispatch__", "__torch_function__"})  # methods of modes and tensor classes that calls are handed to
DEEP = 16  # functions between one of them and the one that hands its call on
_UNPACKS = opcode.opmap["CALL_FUNCTION_EX"]  # `func(*args, **kwargs)`

Place = tuple[CodeType | None, int]  # a function, and its instruction
NOWHERE: Place = (None, -1)


class Author(IntEnum):
    """Whose code is it?"""

    OTHER = 0  # torch's, ours, or a handler: of what is handed to it that is the author who made the call
    USER = 1
    RELAY = 2  # the trainer's, and it may be a part of a handler that hands calls on


class Authors:
    """Whose code it is, and the row of a framework's function that computes its loss there; each function is asked once.

    Known by itself: the code of a copied file equals that of the first one, and is somebody else's.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[CodeType, tuple[Author, LossSite | None]]] = {}  # holds the code, or another one would get its number

    def of(self, code: CodeType) -> tuple[Author, LossSite | None]:
        """Return both."""
        known = self.known.get(id(code))
        if known is None:
            if len(self.known) >= KNOWN:
                self.known.clear()  # somebody compiles code as he goes
            author = author_of(code)
            known = self.known[id(code)] = code, (author, _loss_site(code) if author else None)
        return known[1]


class Callers:
    """Walks up the stack to the trainer's own code.

    glimpses: what was seen of loss functions since the last `forget`. taken: what their kernels are given, by argument. beside: what stands
    beside a loss that it need not read, by role. scaler: a GradScaler that multiplied something. end: a function of ours that makes a call
    of the trainer's again, and where that was made: what is above it on the stack has nothing to do with it.
    """

    def __init__(self, account: Balance) -> None:
        self.glimpses: dict[tuple[str, CodeType], Glimpse] = {}
        self.taken: dict[str, Taken] = {}
        self.beside: dict[Role, Taken] = {}
        self.scaler: torch.amp.GradScaler | None = None
        self.end: tuple[CodeType | None, Place] = (None, NOWHERE)
        self._holding = Holding(account)
        self._authors = Authors()

    def caller(self, above: int = 1) -> Place:
        """Return the innermost function of the trainer that is running, and its instruction. above: frames that are certainly ours."""
        frame: FrameType | None = sys._getframe(above + 1)
        known = self._authors.known
        while frame is not None:
            code = frame.f_code
            found = known.get(id(code))
            user, site = self._authors.of(code) if found is None else found[1]
            if user:
                if user is Author.RELAY and (issuer := above_handler(frame)) is not None:
                    frame = issuer
                    continue
                if site is not None and (code.co_filename, code) not in self.glimpses:
                    self._glimpse(site, frame)
                return code, frame.f_lasti
            if code is self.end[0]:
                return self.end[1]
            if code.co_name == "scale" and code.co_qualname.endswith("GradScaler.scale"):  # or a sharded one's
                self.scaler = variables(frame).get("self")
            frame = frame.f_back
        return NOWHERE

    def place(self) -> Place:
        """Return the same, and look at nothing on the way."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if self._authors.of(code)[0]:
                return code, frame.f_lasti
            frame = frame.f_back
        return NOWHERE

    def _glimpse(self, site: LossSite, frame: FrameType) -> None:
        """Look at the options that a loss function runs under, and hold what a kernel is given; once a function and step."""
        key, variables = (frame.f_code.co_filename, frame.f_code), frame.f_locals
        self.glimpses[key] = Glimpse(site, {})
        try:
            self.glimpses[key] = glimpse(site, variables)
            for name in site.kernel.tensors_read() if site.kernel is not None else ():
                tensor = variables.get(name)
                if isinstance(tensor, Tensor):
                    self.taken[name] = self._take(tensor)
            for role, path in site.beside:
                self._take_beside(Role(role), follow(path, variables))
        except Exception as error:  # noqa: BLE001 - a config object may do anything when it is asked
            log.warning("nanscope [settings-unread]: %s of %s (%s)", site.function, site.file, words_of(error))
        if type(variables) is dict:
            variables.clear()  # a copy, which would keep alive what the function lets go of

    def _take_beside(self, role: Role, found: object) -> None:
        parts = [local(part) for part in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(part, Tensor)]
        whole = [part for part in parts if part is not None]
        if whole and len(whole) == len(parts):
            self.beside[role] = self._take(whole[0] if isinstance(found, Tensor) else torch.cat([part.flatten() for part in whole]))

    def _take(self, tensor: Tensor) -> Taken:
        """Hold a tensor that a loss is given until `forget`, if there is room for it."""
        held = is_plain(tensor) and self._holding.add(tensor)
        return Taken(tensor if held else None, version_of(tensor), place_of(tensor))

    def forget(self) -> None:
        """What was seen belongs to one backward pass."""
        self.glimpses, self.taken, self.beside, self.scaler = {}, {}, {}, None
        self._holding.close()


def _loss_site(code: CodeType) -> LossSite | None:
    """Return the row of a function that has something to be looked at, None if there is none or its variables are not ours to read."""
    site = site_in(code.co_filename, code.co_qualname)
    return site if site is not None and (site.key is not None or site.beside) and is_open(code) else None


def author_of(code: CodeType) -> Author:
    """Return whose code it is."""
    if not is_user(code.co_filename) or code.co_name in HANDLERS:
        return Author.OTHER
    return Author.RELAY if _UNPACKS in code.co_code[::2] else Author.USER


def above_handler(frame: FrameType) -> FrameType | None:
    """Return who made a call that a mode or a tensor class of the trainer's hands on, by way of a function; None if none does."""
    up = frame.f_back
    for _ in range(DEEP):
        if up is None:
            return None
        if up.f_code.co_name in HANDLERS and is_user(up.f_code.co_filename):
            return up.f_back
        up = up.f_back
    return None


def is_user(file: str) -> bool:
    """Code of the trainer, as opposed to torch's and our own (the demo and `bench` train, a kernel's formula may be our objective)."""
    if file.startswith(_OURS):
        return file.endswith(("demo.py", "objective.py")) or file.startswith(_BENCH)
    return not (file.startswith((_TORCH, "<")) or file.endswith("typing_extensions.py") or _is_of_python(file))


def _is_of_python(file: str) -> bool:
    """Is it Python's own library, which calls what it is given: a context manager, a cache, a warning around a function?"""
    return file.startswith(_LIBRARY) and "site-packages" not in file and "dist-packages" not in file
