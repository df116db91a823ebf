"""`nanscope.report`: the suffix chooses the renderer, every renderer takes every kind of verdict, and no half file is ever left."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from verdicts import KINDS, hostile, verdict_of

from nanscope import report
from nanscope.errors import NanscopeError
from nanscope.report.render import RENDERERS, render, suffixes
from nanscope.verdict.incident import Verdict


@pytest.mark.parametrize("suffix", suffixes())
@pytest.mark.parametrize("kind", KINDS)
def test_every_renderer_takes_every_kind(kind: str, suffix: str, tmp_path: Path) -> None:
    """A file comes out, and nothing else is left beside it but the picture of a text that shows one."""
    path = tmp_path / f"report{suffix}"
    render(verdict_of(kind), path)
    assert path.stat().st_size > 50
    beside = {"report.png"} if suffix == ".md" and verdict_of(kind).incidents else set[str]()
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, *beside}


@pytest.mark.parametrize("kind", KINDS)
def test_no_line_of_the_text_ends_in_blanks(kind: str, tmp_path: Path) -> None:
    """It is put into mails and commit messages."""
    render(verdict_of(kind), tmp_path / "report.txt")
    lines = (tmp_path / "report.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.parametrize("suffix", suffixes())
def test_every_renderer_takes_hostile_strings(suffix: str, tmp_path: Path) -> None:
    """Text that no codec or template likes in every field stops no renderer."""
    render(hostile(), tmp_path / f"report{suffix}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("healthy", "absorbed")])
def test_the_kinds_are_what_they_are_called(kind: str) -> None:
    """The examples of this file are incidents, each of its own phase."""
    incident = verdict_of(kind).incidents[0]
    phases = {"input": "input", "optimizer": "optimizer", "backward, finite loss": "backward"}
    assert incident.phase == phases.get(kind, "forward")
    assert (incident.picture is None) == (kind == "observed only")
    if kind == "history":
        assert [entry.step for entry in incident.history] == list(range(1, 11))  # the bad one as well
    if kind == "observed only":
        assert incident.origin.file is None and not incident.origin.source and not incident.rows


def test_the_suffix_chooses(tmp_path: Path) -> None:
    """Upper case is the same suffix; text and pictures are what they claim to be."""
    verdict = verdict_of("forward masked")
    for name, start in (("a.HTML", b"<!doctype html>"), ("a.png", b"\x89PNG"), ("a.json", b"{")):
        render(verdict, tmp_path / name)
        assert (tmp_path / name).read_bytes().lstrip().startswith(start)
    render(verdict, str(tmp_path / "a.txt"))
    assert verdict.incidents[0].headline.split()[0] in (tmp_path / "a.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz", ".html"])
def test_an_unknown_suffix_is_a_clear_error(name: str, tmp_path: Path) -> None:
    """The error names the suffixes that are known, and no file is made."""
    with pytest.raises(NanscopeError, match=r"\.html, \.md, \.png, \.txt, \.json") as caught:
        render(verdict_of("healthy"), tmp_path / name)
    assert caught.value.slug == "unknown-format"
    assert not list(tmp_path.iterdir())


def test_json_is_json_whatever_the_settings_hold(tmp_path: Path) -> None:
    """NaN becomes text, objects become text, and the rest is what the verdict says."""
    settings = {"beta": math.nan, "dtype": torch.float16, "clip": (0.2, math.inf)}
    incident = dataclasses.replace(verdict_of("input").incidents[0], settings=settings)
    render(Verdict((incident,)), tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert data["incidents"][0]["settings"] == {"beta": "nan", "dtype": "torch.float16", "clip": [0.2, "inf"]}
    assert data["incidents"][0]["sentence"] == incident.sentence


def test_a_missing_folder_is_an_oserror(tmp_path: Path) -> None:
    """Where a file cannot be written the error is the system's own."""
    with pytest.raises(FileNotFoundError):
        render(verdict_of("healthy"), tmp_path / "nowhere" / "a.html")


def test_a_renderer_that_fails_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of before is untouched, and no temporary file stays, whether drawing fails or writing does."""
    path = tmp_path / "a.txt"
    path.write_text("before", encoding="utf-8")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setitem(RENDERERS, ".txt", broken)
        with pytest.raises(OSError, match="No space"):
            render(verdict_of("healthy"), path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", broken)
        with pytest.raises(OSError, match="No space"):
            render(verdict_of("healthy"), path)
    assert path.read_text(encoding="utf-8") == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_report_can_be_read_by_others(tmp_path: Path) -> None:
    """The file has the permissions that any new file has."""
    render(verdict_of("healthy"), tmp_path / "a.html")
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.html").stat().st_mode == (tmp_path / "plain").stat().st_mode


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_reports_know_only_what_lies_below() -> None:
    """No report imports the session, the launcher, the command line or the instruments."""
    above = ("nanscope.watching", "nanscope.__main__", "nanscope.capture", "nanscope.demo")
    for path in Path(report.__file__).parent.glob("*.py"):
        assert not [name for name in _imports(path) if name.startswith(above)], path.name
