"""What `nanscope run` is to run: a script, a module, or a command that starts them in processes of their own.

nanscope run train.py --lr 1e-6          in this process, as Python would
nanscope run -m package.train            the same of a module
nanscope run -- torchrun train.py        a command that is Python, of this environment, in this process; any other one as a child
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from nanscope.errors import NanscopeError
from nanscope.text import meant
from nanscope.watching.place import name_of

# What is meant for the command, by whoever sends it to the process that was started in its place: most of it would end that process.
HANDED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR", "SIGALRM")
    if hasattr(signal, name)
)
OF_THE_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))  # goes to all that run there


@dataclass(frozen=True, slots=True)
class Target:
    """What is run. argv: as it sees it. module: argv[0] is the name of one. command: it is a process of its own."""

    argv: tuple[str, ...]
    module: bool = False
    command: bool = False

    @staticmethod
    def of(target: str, args: Sequence[str], module: bool) -> Target:
        """Return what a person means. Raises NanscopeError if there is no such script or command."""
        if module:
            return Target((target, *args), module=True)
        is_file = Path(target).is_file()
        found = str(Path(target).absolute()) if is_file and os.access(target, os.X_OK) else None if is_file else shutil.which(target)
        if Path(target).is_dir() and found is None:
            raise NanscopeError(f"{target!r} is a folder, and no script or command", slug="no-script")
        if found is None and not is_file:
            raise NanscopeError(f"there is no script and no command {target!r}{_near(target)}", slug="no-script")
        if found is None or (is_file and Path(target).suffix == ".py"):
            return Target((target, *args))
        interpreter = _interpreter(Path(found))
        if interpreter is not None and _is_this_environment(interpreter):
            return Target((found, *args))
        if _is_this_environment(Path(found)) and Path(found).name.startswith("python") and args:
            if args[0] == "-m" and len(args) > 1:
                return Target(tuple(args[1:]), module=True)
            if not args[0].startswith("-"):
                return Target.of(args[0], args[1:], False)
        return Target((found, *args), command=True)

    @property
    def name(self) -> str:
        """What the run is called: as the script that the command starts, where it can be told."""
        if self.module:
            return self.argv[0]
        script = next((word for word in self.argv if word.endswith(".py")), None)
        start = self.argv.index("-m") + 1 if script is None and "-m" in self.argv[:-1] else 0
        return name_of([script or self.argv[start]], ())

    def ready(self) -> Callable[[], None]:
        """Return what runs it, and raises what it raises, SystemExit with the status of a command.

        Raises NanscopeError if it cannot be run.
        """
        if self.command:
            return partial(_run_command, self.argv)
        if not self.module:
            return partial(_run_script, self.argv, _compiled(self.argv[0]))
        with _as_main(self.argv, True):
            if not _module_exists(self.argv[0]):
                raise NanscopeError(f"there is no module {self.argv[0]!r}", slug="no-module")
        return partial(_run_module, self.argv)


def _near(target: str) -> str:
    """Which script of the same folder a person can have meant."""
    folder = Path(target).parent
    try:
        return meant(target, [str(folder / path.name) for path in folder.glob("*.py")])
    except (OSError, ValueError):  # the latter for a name that no path can have
        return ""


def _interpreter(path: Path) -> Path | None:
    """Return the Python that a script names in its first line, None if it names none."""
    try:
        with path.open("rb") as file:
            words = file.readline(1000).removeprefix(b"#!").split() if file.read(2) == b"#!" else []
    except OSError:
        return None
    named = [word.decode(errors="replace") for word in words]
    if named and Path(named[0]).name == "env":
        named = [shutil.which(named[1]) or ""] if len(named) == 2 else []
    return Path(named[0]) if len(named) == 1 and Path(named[0]).name.startswith("python") else None


def _is_this_environment(interpreter: Path) -> bool:
    """Would it be this interpreter? All of an environment stand in one folder, which links to another environment's do not."""
    return interpreter.parent.resolve() == Path(sys.executable).parent.resolve()


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _compiled(path: str) -> types.CodeType:
    try:
        return compile(
            Path(path).read_bytes(), str(Path(path).absolute()), "exec", dont_inherit=True
        )  # what this file imports from __future__
    except (SyntaxError, ValueError) as error:
        raise NanscopeError(f"{path} is not a Python script: {error}", slug="not-python") from None


def _run_script(argv: Sequence[str], code: types.CodeType) -> None:
    main, path = types.ModuleType("__main__"), code.co_filename
    main.__dict__.update({"__file__": path, "__builtins__": __builtins__, "__cached__": None, "__package__": None, "__spec__": None})
    main.__loader__ = SourceFileLoader("__main__", path)
    with _as_main(argv, False):
        sys.modules["__main__"] = main  # as for `python script.py`: pickling and dataclasses look things up there
        exec(code, main.__dict__)


def _run_module(argv: Sequence[str]) -> None:
    with _as_main(argv, True):
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


@contextmanager
def _as_main(argv: Sequence[str], module: bool) -> Iterator[None]:
    """Make sys.argv, sys.path and __main__ what they are under `python target args`."""
    before, path, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = list(argv)
    if not sys.flags.safe_path:
        sys.path[: _is_of_this_command(sys.path[0])] = [str(Path.cwd()) if module else str(Path(argv[0]).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, path
        if main is not None:
            sys.modules["__main__"] = main


def _is_of_this_command(place: str) -> bool:
    """Is this where Python imports from since `nanscope` lies there, or was run by `python -m nanscope` there?"""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name == f"{__package__.partition('.')[0]}.__main__" and place == str(Path.cwd())
    file = Path(getattr(main, "__file__", None) or "")
    return file.stem == __package__.partition(".")[0] and place == str(file.resolve().parent)


def _run_command(argv: Sequence[str]) -> None:
    try:
        run_command(argv)
    except OSError as error:
        raise NanscopeError(f"{argv[0]} cannot be run ({error.strerror or error})", slug="no-script") from None


def run_command(argv: Sequence[Any], program: Any = None, env: Mapping[Any, Any] | None = None) -> NoReturn:
    """Run a command, hand signals on to it, and leave with its status as a shell tells it.

    program: its file, which this process was to become; it has what that would have had. Raises OSError if that cannot be run.
    """
    with ExitStack() as undo:
        child: list[subprocess.Popen[bytes]] = []
        early: list[int] = []  # signals that came while it was being started
        for number in HANDED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the command inherits that, and is to be left alone
                before = signal.signal(number, _hand_on(child, early))
                undo.callback(signal.signal, number, signal.SIG_DFL if before is None else before)
        child.append(subprocess.Popen(argv, executable=program, env=env, close_fds=False, restore_signals=program is None))
        for missed in early:
            child[0].send_signal(missed)
        status = None
        while status is None:  # a signal that another thread was given, or that came just before, does not end a wait
            with suppress(subprocess.TimeoutExpired):
                status = child[0].wait(1.0)
    raise SystemExit(128 - status if status < 0 else status)


def _hand_on(child: Sequence[subprocess.Popen[bytes]], early: list[int]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, _: FrameType | None) -> None:
        if number in OF_THE_TERMINAL and _from_terminal():
            return
        early.extend([] if child else [number])
        for process in child:
            process.send_signal(number)

    return handler


def _from_terminal() -> bool:
    """Is this process in the foreground of its terminal? Its Ctrl-C goes to everybody there, wherever their input comes from."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
