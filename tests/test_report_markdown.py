"""The report for an issue: what a code host makes of it is what was meant, whatever the run was called."""

from __future__ import annotations

import html
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt  # rich needs it, so it is there
from verdicts import KINDS, NASTY, hostile, incident_of, verdict_of

import nanscope
from nanscope.report.markdown import block, code, escaped, render_markdown
from nanscope.report.render import render
from nanscope.verdict.incident import Verdict

HOST = MarkdownIt("commonmark").enable(["table", "strikethrough"])

EVIL = (
    "*bold* _it_ **x** ~~gone~~ `code` ``` fence",
    "[click](https://evil.example) ![i](https://evil.example/a.png) <https://evil.example>",
    "<script>alert(1)</script> <img src=x onerror=alert(1)> &lt; &amp;",
    "@somebody #12 org/repo#13 www.evil.example https://evil.example",
    "| a | b |",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "1) item",
    "> quote",
    "=====",
    "$x^2$ \\( y \\)",
    "a\\*b",
)


def text_of(html: str) -> str:
    """What a reader sees of a page."""
    bare = re.sub(r"<[^>]*>", "", html)
    for name, sign in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&amp;", "&")):
        bare = bare.replace(name, sign)
    return bare.strip()


@pytest.mark.parametrize("words", EVIL)
def test_words_come_out_as_they_were(words: str) -> None:
    """No sign of them means anything: a paragraph with exactly this text, and no person is called and no link is made."""
    written = escaped(words)
    html = HOST.render(written)
    assert re.fullmatch(r"<p>.*</p>\n", html) and text_of(html) == words
    assert not re.search(r"<(a|img|script|em|strong|code|s|h1|li)\b", html)
    assert not re.search(r"(?<!&)@\w|(?<![&\w])#\d|https?://|www\.", written)


@pytest.mark.parametrize("words", [*EVIL, "`", "``a``", " ", "a|b"])
def test_code_comes_out_as_it_was(words: str) -> None:
    """A fence is longer than any in it, in a line and in a block."""
    assert text_of(HOST.render(code(words))) == words.strip()
    assert text_of(HOST.render("\n".join(block([words], "diff")))) == words.strip()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_verdict_has_one(kind: str) -> None:
    """The sentence stands in it, and every table and block is closed."""
    verdict = verdict_of(kind)
    text = render_markdown(verdict)
    html = HOST.render(text)
    words = verdict.incidents[0].sentence if verdict.incidents else verdict.sentence
    assert words[1:40].rstrip(".") in text_of(html).replace("\n", " ")
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0
    assert text.count("<details>") == text.count("</details>")
    assert all(line == line.rstrip() for line in text.splitlines() if not line.startswith((" ", "-", "+")))


def test_a_fix_that_is_known_in_the_source_is_a_diff() -> None:
    """It can be copied, with the lines around it."""
    text = render_markdown(verdict_of("forward masked"))
    found = re.search(r"```diff\n(.*?)```", text, re.DOTALL)
    assert found is not None
    lines = found.group(1).splitlines()
    assert lines[0].startswith("--- ") and lines[2].startswith("@@ -")
    assert [line for line in lines[3:] if line[0] in "-+"] == ["+    log_ratio = log_ratio.masked_fill(mask == 0, 0.0)"]


def test_nothing_hostile_becomes_markup() -> None:
    """A verdict whose every string is hostile makes no link, no picture and no tag but ours."""
    for text in (NASTY, *EVIL):
        html = HOST.render(render_markdown(hostile(text=text)))
        assert not re.search(r"<(a|img|script|iframe|style)\b", html, re.IGNORECASE)
        tags = set(re.findall(r"</?([a-z][a-z0-9]*)", html))
        assert tags <= {
            "h2",
            "p",
            "code",
            "pre",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "strong",
            "ul",
            "li",
            "details",
            "summary",
            "sub",
        }


def test_the_picture_is_beside_it(tmp_path: Path) -> None:
    """One command writes both, and the text shows the picture by its name."""
    render(verdict_of("forward masked"), tmp_path / "my report.md")
    assert (tmp_path / "my report.png").read_bytes().startswith(b"\x89PNG")
    assert "](my%20report.png)" in (tmp_path / "my report.md").read_text(encoding="utf-8")


def test_the_script_that_fails_alike_is_beside_it(tmp_path: Path) -> None:
    """A maintainer gets something to run; what is linked stops at the harm."""
    model = torch.nn.Linear(2, 3)
    with nanscope.watch(model, out=tmp_path) as scope:
        torch.exp(100 * model(torch.ones(4, 2)).abs() + 90).mean().backward()
    render(scope.verdict, tmp_path / "report.md")
    assert "](report.repro.py), on nothing but torch (" in (tmp_path / "report.md").read_text(encoding="utf-8")
    subprocess.run((sys.executable, tmp_path / "report.repro.py"), check=True, timeout=120)


def test_a_healthy_run_has_no_picture(tmp_path: Path) -> None:
    """There is nothing to draw."""
    render(verdict_of("healthy"), tmp_path / "report.md")
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize("words", ["see @octocat", "fixes #12", "like GH-12", "o/r#12 of @o/team"])
def test_nobody_is_named_and_no_issue_is_linked(words: str) -> None:
    """A code host looks for names in the page that it has made, where an entity is the sign itself: nothing may follow that sign there."""
    page = html.unescape(HOST.render(escaped(words)))
    assert text_of(page).strip() == words
    assert not re.search(r"@\w|#\d|GH-\d", page)


def test_the_command_that_is_proposed_is_quoted() -> None:
    """The name of a file is whatever a stranger called it."""
    name = "step-1 $(touch x);`y`.safetensors"
    (line,) = (line for line in render_markdown(Verdict((incident_of(snapshot=f"run/{name}"),))).splitlines() if "nanscope replay" in line)
    command = re.search(r"(`+) ?(nanscope replay .*?) ?\1(?!`)", line)
    assert command is not None and shlex.split(command[2]) == ["nanscope", "replay", name]
