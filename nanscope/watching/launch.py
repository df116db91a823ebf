"""`nanscope run`: runs a script or a module as Python would, inside a watched block.

The script is not touched. What it raises is passed on after the report; what it does with `sys.exit` is kept.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.verdict.incident import NonFiniteError
from nanscope.watching.disk import MAX_BYTES
from nanscope.watching.dying import last_words
from nanscope.watching.place import OURS, name_of, settle
from nanscope.watching.scope import Scope
from nanscope.watching.step import OnNonFinite


@dataclass(frozen=True, slots=True)
class Ended:
    """How a watched script ended. exit_code: its own, 0 if it did not say; error: what it raised, None if nothing."""

    scope: Scope
    exit_code: int
    error: BaseException | None


def run(
    target: str,
    args: Sequence[str],
    *,
    module: bool,
    out: Path,
    on_nonfinite: OnNonFinite,
    save_steps: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    at_death: Callable[[Scope, str], None] = lambda scope, why: None,
) -> Ended:
    """Run `target`, a script's path or, with module=True, a module's name, and watch it.

    at_death: called with the name of a signal that is about to end the process.
    Raises NanscopeError if there is no such script or module, or if nothing can be written to `out`.
    """
    if not module and not Path(target).is_file():
        raise NanscopeError(f"there is no script {target!r}", slug="no-script")
    exit_code = 0
    error: BaseException | None = None
    with _as_main(target, args, module):
        if module and not _module_exists(target):
            raise NanscopeError(f"there is no module {target!r}", slug="no-module")
        name = name_of([target], ()) if not module else target
        try:
            place = settle(out, name)
        except OSError as problem:
            raise NanscopeError(
                f"{out} cannot be written ({problem.strerror or problem}): choose another --out", slug="not-writable"
            ) from None
        scope = Scope(out=out, on_nonfinite=on_nonfinite, save_steps=save_steps, max_bytes=max_bytes, name=name, place=place)
        try:
            with scope, _children(scope), _known_to_children(place.run), last_words(lambda why: at_death(scope, why)):
                if module:
                    runpy.run_module(target, run_name="__main__", alter_sys=True)
                else:
                    _run_script(target)
        except SystemExit as stop:
            exit_code = stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)
            error = stop if stop.code is not None and not isinstance(stop.code, int) else None
        except NonFiniteError:
            pass  # asked for, and the report tells it better
        except BaseException as raised:  # noqa: BLE001 - the script's own failure: reported after the verdict, then passed on
            exit_code, error = (130 if isinstance(raised, KeyboardInterrupt) else 1), raised
    return Ended(scope, exit_code, error)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _run_script(path: str) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update({"__file__": path, "__builtins__": __builtins__, "__cached__": None, "__package__": None, "__spec__": None})
    sys.modules["__main__"] = main  # as for `python script.py`: pickling and dataclasses look things up there
    try:
        code = compile(Path(path).read_bytes(), path, "exec")
    except (SyntaxError, ValueError) as error:
        raise NanscopeError(f"{path} is not a Python script: {error}", slug="not-python") from None
    exec(code, main.__dict__)


@contextmanager
def _children(scope: Scope) -> Iterator[None]:
    """Where nothing was watched here, say that other processes ran: what trains there is not seen from here."""
    before = _work_of_children()
    try:
        yield
    finally:
        if not scope.steps and not scope.backwards and (_work_of_children() != before or _living_children()):
            scope.missed(
                "child-processes",
                "what the processes did that the script started: put `nanscope run` before the command that each of them runs, as in "
                "`torchrun -m nanscope run train.py`, or `nanscope.watch` into the script",
            )


def _work_of_children() -> float:
    """What processes that have ended took, in page faults: every one takes some."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _living_children() -> bool:
    return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))


@contextmanager
def _known_to_children(run: str) -> Iterator[None]:
    """What the script starts, and watches by itself, is told apart from what another one does at the same time."""
    before = os.environ.get(OURS)
    os.environ.setdefault(OURS, run)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(OURS, None)


@contextmanager
def _as_main(target: str, args: Sequence[str], module: bool) -> Iterator[None]:
    """Make sys.argv, sys.path and __main__ what they are under `python target args`."""
    argv, path, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = [target, *args]
    sys.path.insert(0, str(Path.cwd()) if module else str(Path(target).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main
