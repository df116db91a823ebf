"""`nanscope run`: runs a script or a module as Python would, inside a watched block.

The script is not touched. What it raises is passed on after the report; what it does with `sys.exit` is kept.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nanscope.errors import NanscopeError
from nanscope.verdict.incident import NonFiniteError
from nanscope.watching.disk import MAX_BYTES
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
) -> Ended:
    """Run `target`, a script's path or, with module=True, a module's name, and watch it.

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
            with scope, _known_to_children(place.run):
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
