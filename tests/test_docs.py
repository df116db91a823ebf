"""The documentation: whatever nanscope says with a slug can be looked up, every cause has a page, and no page is forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanscope.causes import Cause

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "nanscope").rglob("*.py"))}

FAILSAFES = {"_failsafe", "failsafe", "door", "caught"}  # failsafe("tag", …) warns of tag-failed
SLUG = re.compile(r"[a-z]+(?:_[a-z]+)+|unrecognised")  # of a note or a finding


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def text_in(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def errors(tree: ast.AST) -> Iterator[str]:
    """`slug="…"`"""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "slug" and text_in(node.value):
            yield text_in(node.value)


def warnings(tree: ast.AST) -> Iterator[str]:
    """`"nanscope [slug]: …"`, and what a failsafe is told."""
    for node in ast.walk(tree):
        yield from re.findall(r"^nanscope \[([a-z-]+)\]", text_in(node))
        if isinstance(node, ast.Call) and name_of(node) in FAILSAFES and node.args and text_in(node.args[0]):
            yield f"{text_in(node.args[0])}-failed"


def notes(tree: ast.AST) -> Iterator[str]:
    """`note("slug", …)`, and pairs `("slug", text)` as they stand in a snapshot."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and name_of(node) in {"note", "_note", "Note"}
            and node.args
            and SLUG.fullmatch(text_in(node.args[0]))
        ):
            yield text_in(node.args[0])
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and SLUG.fullmatch(text_in(node.elts[0])) and not text_in(node.elts[1]):
            yield text_in(node.elts[0])


def gaps(tree: ast.AST) -> Iterator[str]:
    """`gap("slug", …)`, `missed("slug", …)`, unless the same is also a warning."""
    for node in ast.walk(tree):
        slug = text_in(node.args[0]) if isinstance(node, ast.Call) and name_of(node) in {"gap", "Gap", "missed"} and node.args else ""
        if slug and slug not in headings("Warnings"):
            yield slug


def findings(tree: ast.AST) -> Iterator[str]:
    """`Finding("slug", …)`, and what stands in for it: an argument, or the first entry of a row."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node) in {"Finding", "_unequal"}:
            yield from (text_in(argument) for argument in node.args if SLUG.fullmatch(text_in(argument)))
        if isinstance(node, ast.Tuple) and len(node.elts) == 4 and SLUG.fullmatch(text_in(node.elts[0])) and not text_in(node.elts[1]):
            yield text_in(node.elts[0])


SECTIONS = {  # of messages.md: (where such slugs are collected, how)
    "Errors": (("",), errors),
    "Warnings": (("",), warnings),
    "Gaps": (("verdict/run.py", "watching"), gaps),
    "Notes": (("verdict/diagnose.py", "verdict/run.py", "capture/rerun.py", "watching"), notes),
    "Findings of an audit": (("audit",), findings),
}


def headings(section: str) -> list[str]:
    """The slugs under a heading of messages.md."""
    text = (DOCS / "messages.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^#### (\S+)$", part, re.MULTILINE)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_slug_has_its_heading(section: str) -> None:
    """Whatever is raised, logged, noted or found can be looked up; and what cannot happen any more is not explained."""
    rooms, collect = SECTIONS[section]
    inside = [tree for path, tree in SOURCES.items() if any(path.is_relative_to(ROOT / "nanscope" / room) for room in rooms)]
    in_the_code = {slug for tree in inside for slug in collect(tree)}
    assert sorted(in_the_code) == sorted(headings(section))


def test_every_message_is_explained() -> None:
    """A heading without a sentence under it explains nothing."""
    text = (DOCS / "messages.md").read_text(encoding="utf-8")
    assert all(re.search(r"[a-z]{3}.*\.$", part, re.MULTILINE) for part in re.split(r"^#### .*$", text, flags=re.MULTILINE)[1:])


def test_every_cause_has_a_page() -> None:
    """One Markdown file a cause, and no other."""
    folder = ROOT / "nanscope" / "verdict" / "explanations"
    pages = {path.stem for path in folder.glob("*.md")}
    assert pages == set(Cause) - {Cause.UNKNOWN}


def test_every_page_is_in_the_navigation() -> None:
    """A page that no menu leads to is not read."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"causes/index.md"}  # the hook enters the causes
    assert {page for page in pages if f" {page}\n" not in menu} == set()


def test_links_between_files_lead_somewhere() -> None:
    """Of README.md, CONTRIBUTING.md and CHANGELOG.md; those of the pages are checked when they are built."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
        assert [target for target in targets if not (ROOT / target).exists()] == [], name
