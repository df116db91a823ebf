"""Where in the trainer's code a call is made, and what is seen of the framework's loss functions on the way there."""

from __future__ import annotations

import logging
import opcode
import sys
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


class Callers:
    """Walks up the stack to the trainer's own code.

    glimpses: what was seen of loss functions since the last `forget`. taken: what their kernels are given, by argument. beside: what stands
    beside a loss that it need not read, by role. scaler: a GradScaler that multiplied something. end: a function of ours that makes a call
    of the trainer's again, and where that was made: what is above it on the stack has nothing to do with it.
    """

    def __init__(self, account: Balance) -> None:
        self.glimpses: dict[CodeType, Glimpse] = {}
        self.taken: dict[str, Taken] = {}
        self.beside: dict[Role, Taken] = {}
        self.scaler: torch.amp.GradScaler | None = None
        self.end: tuple[CodeType | None, Place] = (None, NOWHERE)
        self._holding = Holding(account)
        self._users: dict[CodeType, Author] = {}
        self._sites: dict[CodeType, LossSite] = {}  # functions in which a framework computes its loss

    def caller(self) -> Place:
        """Return the innermost function of the trainer that is running, and its instruction."""
        frame: FrameType | None = sys._getframe(2)
        users = self._users
        while frame is not None:
            code = frame.f_code
            user = users.get(code)
            if user is None:
                if len(users) >= KNOWN:
                    users.clear()  # somebody compiles code as he goes
                    self._sites.clear()
                user = users[code] = author_of(code)
                if user and (site := _loss_site(code)) is not None:
                    self._sites[code] = site
            if user:
                if user is Author.RELAY and (issuer := above_handler(frame)) is not None:
                    frame = issuer
                    continue
                if code in self._sites and code not in self.glimpses:
                    self._glimpse(self._sites[code], frame)
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
            if self._users[code] if code in self._users else author_of(code):
                return code, frame.f_lasti
            frame = frame.f_back
        return NOWHERE

    def _glimpse(self, site: LossSite, frame: FrameType) -> None:
        """Look at the options that a loss function runs under, and hold what a kernel is given; once a function and step."""
        self.glimpses[frame.f_code] = Glimpse(site, {})
        variables = frame.f_locals
        try:
            self.glimpses[frame.f_code] = glimpse(site, variables)
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
    """Code of the trainer, as opposed to torch's and our own (the demo is a trainer, and a kernel's formula may be our objective)."""
    if file.startswith(_OURS):
        return file.endswith(("demo.py", "objective.py"))
    return not (file.startswith((_TORCH, "<")) or file.endswith("contextlib.py"))
