"""A signal that ends the process: what was found is still told, and then it dies of that signal, as it would have without us.

Only for `nanscope run`, only where nobody else handles the signal, and never in the way: the work is done in a thread, which the kernel's
side of the interpreter wakes even while training stands in a call into C, and which has so many seconds for it. What the script installs
later takes the place of ours; ours does nothing then, and nothing in a process that was forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

PATIENCE = 10.0  # seconds; launchers kill for good after 30

DONE = b"\0"  # no signal has this number

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def last_words(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` with the name of a signal that is about to end this process."""
    free = [one for one in SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread() or os.name != "posix" or not free:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    owner = os.getpid()

    def handler(number: int, _: FrameType | None) -> None:
        if signal.getsignal(number) is handler:  # and not called by one that took its place
            if os.getpid() == owner:
                os.write(writer, bytes([number]))
            else:
                die(number)

    def listen() -> None:
        while (number := os.read(reader, 1)) != DONE:
            if signal.getsignal(number[0]) is handler:
                speaking = threading.Thread(target=_quietly, args=(say, signal.Signals(number[0]).name), daemon=True)
                speaking.start()
                speaking.join(PATIENCE)
                die(number[0])

    def in_child() -> None:
        for one in free:
            if signal.getsignal(one) is handler:
                signal.signal(one, signal.SIG_DFL)
                signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=in_child)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    for one in free:
        signal.signal(one, handler)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    try:
        yield
    finally:
        if before == -1 and (now := signal.set_wakeup_fd(-1)) != writer:
            signal.set_wakeup_fd(now)  # somebody else's, by now
        for one in free:
            if signal.getsignal(one) is handler:
                signal.signal(one, signal.SIG_DFL)
        os.write(writer, DONE)
        listener.join()
        os.close(writer)
        os.close(reader)


def die(number: int) -> None:
    """End this process by a signal, from whatever thread: Python itself lets only the main one change what a signal does."""
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL
    os.kill(os.getpid(), number)


def _quietly(say: Callable[[str], None], name: str) -> None:
    with contextlib.suppress(BaseException):
        say(name)
