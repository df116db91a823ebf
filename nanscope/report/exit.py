"""How a verb ends: the status it leaves with, the files it was asked for, and one line for what kept it from its end.

0 healthy, 3 something non-finite was found, 4 nothing was found and not everything was watched, 1 an error that is explained in one line,
2 wrong usage. A watched script that fails by itself keeps its own status.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanscope.errors import NanscopeError, words_of
from nanscope.plain import show
from nanscope.report.clean import clean
from nanscope.report.streams import CLOSED_PIPE, settle, silence, unwrapped

if TYPE_CHECKING:
    from nanscope.verdict.incident import Verdict

HEALTHY, FAILED, FOUND, UNSEEN = 0, 1, 3, 4  # 2 is click's

STATUSES = {"proven": HEALTHY, "doubt": UNSEEN, "harm": FOUND}  # by the tone of a verdict


def status_of(verb: Callable[[], object]) -> int:
    """Run a verb, say in one line what kept it from its end, and return the exit status."""
    try:
        verb()
    except SystemExit as left:
        if unwrapped():  # how click leaves a pipe that nobody reads
            return CLOSED_PIPE
        return left.code if isinstance(left.code, int) else FAILED if left.code else HEALTHY
    except NanscopeError as error:
        return failed(str(error))
    except ModuleNotFoundError as error:
        if _is_ours(error):
            raise
        return failed(_lacking("this", error))
    except BrokenPipeError:
        return CLOSED_PIPE
    except OSError as error:
        if error.filename is None:
            return _unwritten(error)
        return failed(f"{error.filename}: {error.strerror or error}")
    return HEALTHY


def settled(status: int) -> int:
    """Write what the streams still hold, and return the status, another one if it cannot be written."""
    try:
        settle()
    except BrokenPipeError:
        return CLOSED_PIPE
    except OSError as error:
        return _unwritten(error)
    return status


def failed(why: str) -> int:
    """End with one line."""
    say(f"nanscope: {why}")
    return FAILED


def say(line: str) -> None:
    """Write a line to standard error, if anybody listens."""
    with suppress(OSError):
        sys.stderr.write(f"{clean(line)}\n")


def _unwritten(error: OSError) -> int:
    """End because of a stream: what was to be said is lost, but for the reason."""
    silence()
    return failed(f"the output cannot be written ({error.strerror or error})")


def _is_ours(error: ModuleNotFoundError) -> bool:
    return (error.name or "nanscope").partition(".")[0] == "nanscope"


def _lacking(what: str, error: ModuleNotFoundError) -> str:
    package = (error.name or "").partition(".")[0]
    return f"{what} needs {package}, which is not installed: pip install {package}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise NanscopeError where a file that was asked for cannot be written."""
    try:
        yield
    except OSError as error:
        raise NanscopeError(f"{path} cannot be written ({error.strerror or error})", slug="not-writable") from None


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write what a verb found, if it was asked for with --json."""
    if path is not None:
        with writing(path):
            path.write_text(json.dumps(show(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def wrote_json(path: Path | None, data: dict[str, Any]) -> bool:
    """Write what a verb found as above, or say in one line why it is not there: what is shown next is kept back by nothing.

    Returns False if it was asked for, and is not there.
    """
    return path is None or attempt(str(path), lambda: write_json(path, data))


def finish(verdict: Verdict, out: Path, shown: Callable[[Path], str] = str, json_file: Path | None = None, busy: bool = True) -> None:
    """Show a verdict, then write it, then leave the page and the picture beside the snapshots: what fails keeps nothing else back.

    out: the directory of the run. shown: its paths as a person would write them. busy: say what is being drawn, on a terminal.
    """
    from nanscope.report.console import progress
    from nanscope.report.render import render
    from nanscope.report.terminal import print_verdict, print_written

    try:
        print_verdict(verdict, file=sys.stderr)
    finally:  # a pipe that is closed keeps nothing back
        wrote_json(json_file, verdict.to_json())
        for path in (out / "report.html", out / "report.png") if verdict.incidents else ():
            with progress(f"drawing {path.name}", file=sys.stderr) if busy else nullcontext():
                drawn = attempt(shown(path), lambda path=path: render(verdict, path))  # type: ignore[misc]
            if drawn:
                with suppress(OSError):
                    print_written(shown(path), file=sys.stderr)


def attempt(name: str, write: Callable[[], None]) -> bool:
    """Write a file, or say in one line why it is not there. Returns whether it is."""
    try:
        write()
    except ModuleNotFoundError as error:
        why = _lacking(Path(name).name, error)
    except NanscopeError as error:
        why = str(error)
    except OSError as error:
        why = f"{name} cannot be written ({error.strerror or error})"
    except Exception as error:  # noqa: BLE001 - the verdict was told; what cannot be drawn is one line after it
        why = f"{name} could not be drawn ({words_of(error)})"
    else:
        return True
    say(f"nanscope: {why}")
    return False
