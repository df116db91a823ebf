"""A template of this folder, filled: nothing that is put into it becomes markup, and one script runs in it at most, ours."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def fill(name: str, styles: Sequence[str], script: str = "", script_data: Any = None, **data: object) -> str:
    """Return a page that is complete in itself. styles: files of CSS; data: what the template reads, escaped.

    script: a file of JavaScript, which the page's policy names by its hash. script_data: what that reads, as JSON data; without any there
    is no script.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def read(file: str) -> str:
        return resources.files("nanscope.report").joinpath(file).read_text(encoding="utf-8")

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(read))
    code = f"\n{read(script)}" if script and script_data is not None else ""
    hashed = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = POLICY + (f"; script-src 'sha256-{hashed}'" if code else "")
    return environment.get_template(name).render(
        css=Markup("".join(map(read, styles))), policy=policy, code=Markup(code), json=Markup(_json(script_data)) if code else "", **data
    )


def _json(data: Any) -> str:
    """JSON in which nothing ends a script, begins a comment, or is a line's end to somebody."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return "".join(f"\\u{ord(sign):04x}" if sign in "<>&\u2028\u2029" else sign for sign in text)
