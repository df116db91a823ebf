"""`docs/gallery.py`: each cause is shown with a real report of it, and where one says something else there is no gallery.

Every run makes a selection of them; all of them are made at night, and whenever the documentation is built.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pages import Page
from test_incidents import KNOWN

from nanscope.causes import Cause

ROOT = Path(__file__).parents[1]
BY_DAY = [Cause.WHERE_GRAD_TRAP, Cause.UNINITIALIZED, Cause.HW_BITFLIP]  # with a diff; with advice and a diff; with advice alone


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    """The script, as a module: no package holds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import gallery

    return gallery


def chosen(cause: Cause) -> object:
    """A case for each cause; at night but for those of BY_DAY."""
    return pytest.param(cause, marks=() if cause in BY_DAY else pytest.mark.nightly, id=str(cause))


def test_every_cause_has_an_entry(gallery: ModuleType) -> None:
    """And no other has: what nobody can name is not shown."""
    assert set(gallery.SOURCES) == set(Cause) - {Cause.UNKNOWN}
    assert [path for path in gallery.SOURCES.values() if not path.is_file()] == []


def test_no_entry_is_answered_wrongly(gallery: ModuleType) -> None:
    """What a script is known to be misunderstood in does not stand in a window."""
    assert {name for name in gallery.SCRIPTS.values() if name in KNOWN} == set()


@pytest.mark.parametrize("cause", [chosen(cause) for cause in Cause if cause not in (Cause.UNKNOWN, Cause.ALLREDUCE_NAN)])
def test_an_entry_is_made_of_a_real_report(cause: Cause, gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is inert and names the script, its picture is one, and the section leads to both and shows what is to be done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["build", str(tmp_path)])
    source = gallery.SOURCES[cause]
    section = gallery.make(cause, source, tmp_path / "made")
    check(cause, section, tmp_path / "made", source.name)


@pytest.mark.nightly
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_all_of_it_is_made_as_the_build_makes_it(gallery: ModuleType, tmp_path: Path) -> None:
    """In a process of its own, two ranks among it; and no path of this machine is published."""
    made = tmp_path / "made"
    made.mkdir()
    subprocess.run([sys.executable, str(ROOT / "docs" / "gallery.py"), str(made)], check=True, capture_output=True, timeout=600)
    sections = dict(part.split("\n", 1) for part in f"\n{(made / 'gallery.md').read_text(encoding='utf-8')}".split("\n## ")[1:])
    assert set(sections) == set(gallery.SOURCES)
    for cause, section in sections.items():
        check(Cause(cause), section, made, "" if cause == Cause.ALLREDUCE_NAN else gallery.SOURCES[Cause(cause)].name)


def check(cause: Cause, section: str, folder: Path, source: str) -> None:
    """The files of an entry, and what its section says of them. source: the name of the script, "" if no line of it is to blame."""
    report = (folder / cause / "report.html").read_text(encoding="utf-8")
    page = Page(report)
    assert not page.faults and source in page.text and "gallery.py" not in page.text
    assert str(ROOT) not in report and "/tmp" not in report
    assert (folder / cause / "report.png").read_bytes().startswith(b"\x89PNG")
    assert f"(gallery/{cause}/report.html)" in section and f"(gallery/{cause}/report.png)" in section and f"(causes/{cause}.md)" in section
    assert source in section and ("```diff" in section or "Advice: " in section)


def test_a_gallery_that_lies_is_not_made(gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a script that states another cause, nor with one of which another is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["build", str(tmp_path)])
    with pytest.raises(gallery.Lies, match="is shown for log_zero, and states std_single"):
        gallery.make(Cause.LOG_ZERO, gallery.SOURCES[Cause.STD_SINGLE], tmp_path / "made")
    misunderstood = tmp_path / "misunderstood.py"
    text = gallery.SOURCES[Cause.STD_SINGLE].read_text(encoding="utf-8")
    misunderstood.write_text(text.replace('cause=("std_single"', 'cause=("log_zero"'), encoding="utf-8")
    with pytest.raises(gallery.Lies, match="is shown for log_zero, and nanscope says std_single"):
        gallery.make(Cause.LOG_ZERO, misunderstood, tmp_path / "made")
    assert not (tmp_path / "made").exists()
