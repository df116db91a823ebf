"""A template of this folder, filled: nothing that is put into it becomes markup."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources


def fill(name: str, styles: Sequence[str], **data: object) -> str:
    """Return a page that is complete in itself. styles: files of CSS; data: what the template reads, escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def read(file: str) -> str:
        return resources.files("nanscope.report").joinpath(file).read_text(encoding="utf-8")

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(read))
    return environment.get_template(name).render(css=Markup("".join(map(read, styles))), **data)
