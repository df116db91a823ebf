"""The terminal: what goes to a pipe has no colours and no trailing spaces, what goes to a terminal has colours."""

from __future__ import annotations

import io

import pytest
from pages import odd
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from nanscope.report.console import HARM, WIDTH, console_for, plain, progress, show, steps_bar, table, track


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No escape sequence, no spaces at the end, as wide as COLUMNS says or WIDTH."""
    for columns, width in (("", WIDTH), ("40", 40), ("wide", WIDTH)):
        monkeypatch.setenv("COLUMNS", columns)
        stream = io.StringIO()
        show(Padding(Text("word " * 60, HARM), (0, 2)), file=stream)
        lines = stream.getvalue().splitlines()
        assert lines == [line.rstrip() for line in lines] and "\x1b" not in stream.getvalue()
        assert width - 10 < max(map(len, lines)) <= width


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words, styled."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    show(Text("harm", HARM), file=stream)
    assert "harm" in stream.getvalue() and "\x1b[" in stream.getvalue()


def test_brackets_are_text() -> None:
    """Nothing that a run is called is read as markup."""
    shown = table("[bold]head[/bold]")
    shown.add_row("[red]cell[/red] :smile:")
    assert "[bold]head[/bold]" in plain(shown) and "[red]cell[/red] :smile:" in plain(shown)


def test_progress_is_shown_on_terminals_only() -> None:
    """A pipe gets one line from a bar and nothing from the rest."""
    stream = io.StringIO()
    with progress("waiting", file=stream), steps_bar("training", 2, file=stream) as advance:
        advance("one")
        assert list(track([1, 2], "reading", file=stream)) == [1, 2]
    assert stream.getvalue() == "training …\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_is_told_what_is_running(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First this, then that, in one line however long a file is called; of a single file, too; and nothing of it stays."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    monkeypatch.setattr(Terminal, "encoding", encoding, raising=False)
    with progress("reading [bold]one[/bold]", file=stream) as now:
        now(f"replaying {'a' * 100}\x1b[31m")
    assert list(track(["one"], "weighing", file=stream)) == ["one"]
    shown = stream.getvalue()
    assert all(words in shown for words in ("reading [bold]one[/bold]", "replaying aaa", "weighing"))
    assert "\x1b[31m" not in shown and "a" * 60 not in shown
    assert encoding != "ascii" or "⠋" not in shown
    assert shown.rstrip("\r\n").endswith("\x1b[2K")  # the line is taken away


def test_columns_of_no_width_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """COLUMNS=0 is what some schedulers set."""
    monkeypatch.setenv("COLUMNS", "0")
    stream = io.StringIO()
    show(Text("word " * 60), file=stream)
    assert max(map(len, stream.getvalue().splitlines())) > 100


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("columns", ["1", "2", "3"])
def test_a_terminal_of_no_room_fails_nothing(monkeypatch: pytest.MonkeyPatch, columns: str, terminal: bool) -> None:
    """A table has no room for a letter there; it goes on over the edge."""
    monkeypatch.setenv("COLUMNS", columns)
    shown = table("a", "b")
    shown.add_row("some words", "and more of them")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    show(Group(Text("some words"), shown), file=stream)
    assert "so" in stream.getvalue()


@pytest.mark.parametrize("text", ["\x1b]8;;http://x\x1b\\", "\x07", "\x9b2J", "\u202e", "\u200b", "\u2028", "\r", "\ud800"])
def test_nothing_that_is_shown_commands_the_terminal(text: str) -> None:
    """Whatever was not made clean on its way: in a line, in a table, on a terminal and in a file."""
    shown = table("a")
    shown.add_row(f"x{text}y")
    stream = io.StringIO()
    console_for(stream).print(Group(Text(f"x{text}y"), f"x{text}y", shown))
    for told in (plain(Group(Text(f"x{text}y"), f"x{text}y", shown)), stream.getvalue()):
        assert not odd(told), odd(told)
