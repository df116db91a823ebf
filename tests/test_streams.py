"""Every verb on a stream that is not UTF-8, that nobody reads, that is full or missing, and on a narrow terminal: legible, no traceback."""

from __future__ import annotations

import functools
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from verdicts import ppo_step

from nanscope import __main__ as cli
from nanscope import demo
from nanscope.report.streams import CLOSED_PIPE, SUBSTITUTES, spelled
from nanscope.snapshot.file import save

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes and /dev/full are those of Unix")

SCRIPT = """
import torch
log_ratio = torch.tensor([[-1.0, 99.0, -0.5]], requires_grad=True)
mask = torch.tensor([[1.0, 0.0, 1.0]])
ratio = torch.exp(log_ratio)
((ratio * mask).sum() / mask.sum()).backward()
"""

VERBS: dict[str, tuple[str, ...]] = {
    "check": ("check", "SNAPSHOT"),
    "precision": ("check", "--precision", "SNAPSHOT"),
    "runs": ("runs", "FOLDER"),
    "diff": ("diff", "SNAPSHOT"),
    "run": ("run", "--out", "RUN", "SCRIPT"),
    "replay": ("replay", "SNAPSHOT", "--edit", "clamp:5", "--as", "verl.vanilla"),
    "sweep": ("replay", "SNAPSHOT", "--sweep", "clamp"),
    "variants": ("variants",),
    "variants of one": ("variants", "verl.vanilla"),
    "report": ("report", "FOLDER", "-o", "OUT.html"),
    "explain": ("explain",),
    "explain one": ("explain", "inf_times_zero_mask"),
    "atlas": ("atlas", "tinker.ppo"),
    "audit": ("audit", "SNAPSHOT"),
    "inspect": ("inspect", "SNAPSHOT", "--values", "--program"),
    "demo": ("demo", "--out", "DEMO"),
    "help": ("atlas", "--help"),
    "wrong usage": ("replay", "--no-such-option"),
    "an error": ("explain", "∞ is no cause"),
}
ON_STDERR = {"run", "demo", "wrong usage", "an error"}  # where a verb says what it has to say


@dataclass(frozen=True, slots=True)
class Done:
    """What one call gave."""

    status: object
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one snapshot, and a script."""
    folder = tmp_path_factory.mktemp("streams")
    (folder / "saved").mkdir()
    save(ppo_step({"device": "cpu"}), folder / "saved")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def call(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run a verb in this process, its streams being these; by default both UTF-8."""
    monkeypatch.setattr(demo, "DemoSettings", functools.partial(demo.DemoSettings, steps=2))
    snapshot = next((folder / "saved").glob("*.safetensors"))
    places = {"SNAPSHOT": snapshot, "FOLDER": folder / "saved", "SCRIPT": folder / "train.py", "OUT.html": folder / "OUT.html"}
    places |= {name: tmp_path / name for name in ("RUN", "DEMO")}

    def called(
        *words: str, out: io.TextIOWrapper | str | None = "utf-8", err: io.TextIOWrapper | str | None = "utf-8", columns: str = ""
    ) -> Done:
        streams = [io.TextIOWrapper(io.BytesIO(), it, newline="\n") if isinstance(it, str) else it for it in (out, err)]
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "argv", ["nanscope", *(str(places.get(word, word)) for word in words)])
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            with pytest.raises(SystemExit) as left:
                cli.main()
            assert [sys.stdout, sys.stderr] == streams  # they are given back
        return Done(left.value.code, *map(_read, streams))

    return called


def _read(stream: io.TextIOWrapper | None) -> str:
    held = getattr(stream, "buffer", None)
    return held.getvalue().decode(stream.encoding) if stream is not None and isinstance(held, io.BytesIO) else ""


@contextmanager
def closed_pipe() -> Iterator[io.TextIOWrapper]:
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        yield stream


@contextmanager
def full() -> Iterator[io.TextIOWrapper]:
    """A disk without room."""
    with Path("/dev/full").open("w", encoding="utf-8") as stream:
        yield stream


@pytest.fixture(scope="module")
def known(folder: Path) -> dict[str, Done]:
    """What was asked already, of this folder."""
    return {}


@pytest.fixture
def usual(call: Callable[..., Done], known: dict[str, Done]) -> Callable[[str], Done]:
    """What a verb gives where nothing is unusual; asked once."""

    def once(verb: str) -> Done:
        if verb not in known:
            known[verb] = call(*VERBS[verb])
        return known[verb]

    return once


ENCODINGS = ("ascii", "latin-1", "cp1252")


@pytest.mark.parametrize("verb", VERBS)
def test_what_an_encoding_lacks_is_written_in_other_characters(
    verb: str, call: Callable[..., Done], usual: Callable[[str], Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strict streams of three encodings, and a terminal: the same status and the same words; no question marks, no numbers of characters."""
    for encoding in ENCODINGS:
        done = call(*VERBS[verb], out=encoding, err=encoding)
        assert done.status == usual(verb).status and "Traceback" not in done.err
        for found, wanted in ((done.out, usual(verb).out), (done.err, usual(verb).err)):
            assert found.count("?") == wanted.count("?") and "\\u" not in found and "\\x" not in found
            if verb not in ("run", "demo"):  # whose folder holds what the last call left
                # folded elsewhere: a substitute may be longer
                assert sorted("".join(found.split())) == sorted("".join(spelled(wanted, encoding).split()))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("NO_COLOR", "1")
    terminals = [Terminal(io.BytesIO(), "ascii", newline="\n") for _ in range(2)]
    done = call(*VERBS[verb], out=terminals[0], err=terminals[1])
    assert done.status == usual(verb).status and "Traceback" not in done.err and "\\u" not in done.out + done.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_pipe_that_nobody_reads_is_no_error_of_ours(verb: str, call: Callable[..., Done], usual: Callable[[str], Done]) -> None:
    """The status is that of a program which SIGPIPE ended, and nothing is said of it."""
    with closed_pipe() as pipe:
        streams = {"err": pipe} if verb in ON_STDERR else {"out": pipe}
        done = call(*VERBS[verb], **streams)
        pipe.flush()  # nothing is left for the interpreter's end
    assert done.status == CLOSED_PIPE and done.err == ("" if verb not in ON_STDERR else done.err)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ON_STDERR])
def test_a_full_disk_is_one_line(verb: str, call: Callable[..., Done]) -> None:
    """Standard output cannot be written: that is said, and the status is that of an error."""
    with full() as disk:
        done = call(*VERBS[verb], out=disk)
        disk.flush()
    assert (done.status, done.err) == (1, "nanscope: the output cannot be written (No space left on device)\n")


@pytest.mark.parametrize("verb", VERBS)
def test_streams_that_are_closed_are_missed_by_nobody(verb: str, call: Callable[..., Done], usual: Callable[[str], Done]) -> None:
    """As by `>&-`: the verb does what it is to do."""
    assert call(*VERBS[verb], out=None).status == usual(verb).status
    assert call(*VERBS[verb], err=None).status == usual(verb).status


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
def test_a_narrow_terminal_gets_words_and_not_letters(
    verb: str, columns: int, call: Callable[..., Done], usual: Callable[[str], Done]
) -> None:
    """No line is longer than it, no column so narrow that its words stand letter under letter, and nothing is cut off."""
    done = call(*VERBS[verb], columns=str(columns))
    shown = done.out + done.err
    assert done.status == usual(verb).status
    if verb in ("help", "wrong usage", "an error"):  # click's own, and one line that the terminal wraps
        return
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []
    letters = [line for line in lines if 0 < len(line.strip()) <= 2]
    assert len(letters) <= len(lines) / 8, shown
    if verb not in ("run", "demo", "report"):
        squeezed = [re.sub(r"[\s…]", "", text) for text in (shown, usual(verb).out)]
        words = (
            set(re.findall(r"[a-z_]{5,}", usual(verb).out)) if verb not in ("atlas", "runs") else set()
        )  # a list has no line for what is empty
        assert [word for word in words if word not in squeezed[0]] == []


NASTY = "a b\n\x1b[31mred\u202e\udcff.safetensors"


@pytest.mark.parametrize("verb", ["replay", "audit", "inspect", "report", "missing", "not written"])
def test_a_file_may_be_called_anything(verb: str, call: Callable[..., Done], tmp_path: Path, folder: Path) -> None:
    """With a newline, an escape sequence and what is no Unicode in its name: nothing of it commands a terminal, and all of it is visible."""
    nasty = tmp_path / (NASTY if verb != "replay" else NASTY.replace("\udcff", ""))  # safetensors opens names that are UTF-8
    shutil.copy(next((folder / "saved").glob("*.safetensors")), nasty)
    words = {
        "report": ("report", str(nasty), "-o", str(nasty.with_suffix(".html"))),
        "missing": ("inspect", str(tmp_path / f"no {NASTY}")),
        "not written": ("report", str(nasty), "-o", str(tmp_path / "nowhere" / f"{NASTY}.html")),
    }.get(verb, (verb, str(nasty)))
    done = call(*words)
    said = done.out + done.err
    assert "Traceback" not in said and "\x1b" not in said and "\u202e" not in said
    assert done.status in (0, 1, 3)
    if verb != "replay":  # which has no more to do with the file
        assert "⟨U+001B⟩" in re.sub(r"\s", "", said)


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS if VERBS[verb][0] in ("run", "replay", "variants", "audit", "inspect") and verb != "wrong usage"]
)
def test_a_full_disk_under_json_is_one_line(verb: str, call: Callable[..., Done]) -> None:
    """What cannot be written is named; a run that has found something keeps its status."""
    done = call(VERBS[verb][0], "--json", "/dev/full", *VERBS[verb][1:])
    assert done.status == (3 if VERBS[verb][0] == "run" else 1)
    assert "nanscope: /dev/full cannot be written (No space left on device)" in done.err.splitlines()


def test_every_character_has_one_substitute_that_every_encoding_has() -> None:
    """And none of them is a question mark."""
    for char, other in SUBSTITUTES.items():
        assert other.isascii() and "?" not in other
        assert spelled(char, "ascii") == other
    assert spelled("é ü 中 · ✓", "latin-1") == "é ü \\u4e2d · +"
    assert spelled("é ü", "ascii") == "e u"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line with bash."""
    nanscope_ = f"{sys.executable} -m nanscope"
    text = command.replace("nanscope", nanscope_)
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=120, cwd=folder, check=False)


SHELL = (  # -> status, the whole of standard error
    ("PYTHONIOENCODING=ascii LC_ALL=C nanscope explain exp_overflow", 0, ""),
    ("nanscope variants | true; exit ${PIPESTATUS[0]}", CLOSED_PIPE, ""),
    ("nanscope explain > /dev/full", 1, "nanscope: the output cannot be written (No space left on device)\n"),
    ("nanscope explain >&- 2>&-", 0, ""),
)


@pytest.mark.parametrize(("command", "status", "error"), SHELL)
def test_the_same_in_a_shell(command: str, status: int, error: str, tmp_path: Path) -> None:
    """With the interpreter's own end behind it, which writes what is left in a buffer once more."""
    done = shell(command, tmp_path)
    assert (done.returncode, done.stderr) == (status, error)


def test_a_script_has_its_streams_as_python_gives_them(tmp_path: Path) -> None:
    """What it cannot print fails under `nanscope run` as it does without, and what we say afterwards is legible."""
    (tmp_path / "prints.py").write_text("import sys\nprint(sys.stdout.errors, sys.stderr.errors)\nprint('\\u2713')\n")
    (tmp_path / "closed.py").write_text("import sys\nprint(sys.stdout, file=sys.stderr)\n")
    bare = shell(f"PYTHONIOENCODING=ascii {sys.executable} prints.py", tmp_path)
    ours = shell("PYTHONIOENCODING=ascii nanscope run prints.py", tmp_path)
    assert (ours.returncode, ours.stdout) == (bare.returncode, bare.stdout) == (1, "strict backslashreplace\n")
    assert "UnicodeEncodeError" in ours.stderr
    assert shell("nanscope run closed.py >&-", tmp_path).stderr.startswith("None\n")


def test_help_is_ascii() -> None:
    """Click writes it by itself, and takes no care of what a stream can hold."""
    files = (Path(cli.__file__).parent / "commands").glob("*.py")
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines and [line for line in lines if not line.isascii()] == []
