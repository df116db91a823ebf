"""A template of this folder, filled: nothing that is put into it becomes markup."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources


def fill(name: str, styles: Sequence[str], **data: object) -> str:
    """Return a page that is complete in itself. styles: files of CSS; data: what the template reads, escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    here = resources.files("nanscope.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    css = "".join(here.joinpath(style).read_text(encoding="utf-8") for style in styles)
    return environment.from_string(here.joinpath(name).read_text(encoding="utf-8")).render(css=Markup(css), **data)
