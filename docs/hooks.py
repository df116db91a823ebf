"""Publishes what stands elsewhere or is made now: a page and a report for each cause, CHANGELOG.md, CONTRIBUTING.md; lists parameters."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PUBLISHED = {"changelog.md": ROOT / "CHANGELOG.md", "contributing.md": ROOT / "CONTRIBUTING.md"}


def _causes() -> dict[str, str]:
    """Return the page of each cause, by its name."""
    folder = ROOT / "nanscope" / "verdict" / "explanations"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))}


CAUSES = _causes()
SEEN = """## See it

[The report](../gallery/{name}/report.html) of a script that dies of it, and [those of all causes](../gallery.md#{name})."""


def on_config(config: MkDocsConfig) -> None:
    """Enter the causes into the navigation."""
    for section in config.nav or ():
        if isinstance(section, dict) and "Causes" in section:
            section["Causes"] = ["causes/index.md", *(f"causes/{name}.md" for name in CAUSES)]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that do not stand in this folder, as they are."""
    index = next(file for file in files if file.src_uri == "causes/index.md")
    rows = "".join(f"| [`{name}`]({name}.md) | {text.splitlines()[2]} |\n" for name, text in CAUSES.items())
    index.content_string = f"{index.content_string}\n| cause | what it is |\n| --- | --- |\n{rows}"
    for name, text in CAUSES.items():
        files.append(File.generated(config, f"causes/{name}.md", content=f"{text}\n{SEEN.format(name=name)}\n"))
    _add_gallery(files, config)
    for name, path in PUBLISHED.items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))


def _add_gallery(files: Files, config: MkDocsConfig) -> None:
    """Add the real reports, each as the file that it is, and the page that leads to them."""
    folder = _gallery()
    page = next(file for file in files if file.src_uri == "gallery.md")
    page.content_string = f"{page.content_string}\n{(folder / 'gallery.md').read_text(encoding='utf-8')}"
    for path in sorted(folder.glob("*/report.*")):
        files.append(File.generated(config, f"gallery/{path.relative_to(folder).as_posix()}", abs_src_path=str(path)))


@cache
def _gallery() -> Path:
    """The folder of the reports, which are made once, however often `mkdocs serve` builds."""
    folder = Path(tempfile.mkdtemp(prefix="nanscope-gallery-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = subprocess.run([sys.executable, ROOT / "docs" / "gallery.py", folder], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PluginError(f"there is no gallery:\n{done.stderr}")
    return folder


class Parameters(griffe.Extension):
    """Makes lines like `targets: a trainer` of a docstring a list: Markdown would run them together."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)


def listed(text: str) -> str:
    """Return a docstring in which each parameter begins an item, and `Raises` a paragraph."""
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        named = re.match(r"(\w+(?:, \w+)*):\s+(?=\S)", line)
        if named and not line.startswith(("Notable:", "Example:")):
            found += [""] * (not inside) + [f"- `{named[1]}`: {line[named.end() :]}"]
            inside = True
        elif inside and line.startswith(" "):
            found.append(f"  {line.strip()}")
        elif line.startswith("Raises ") or (inside and line.strip()):
            found += ["", line]
            inside = False
        else:
            found.append(line)
    return "\n".join(found)
