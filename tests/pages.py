"""A page taken apart, and the test that it is inert."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from html.parser import HTMLParser
from importlib import resources

from nanscope.causes import Cause
from nanscope.report.html import MOST_BYTES, render_html
from nanscope.verdict.explain import explanation
from nanscope.verdict.incident import Verdict

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "article", "section", "figure", "figcaption", "div", "p",
    "h1", "h2", "h3", "ul", "ol", "li", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "span", "b", "i", "small", "code",
    "mark", "a", "svg", "defs", "pattern", "path", "rect", "g", "pre", "details", "summary", "button", "label", "select", "script",
}  # fmt: skip
VOID = {"meta"}
SCRIPT = "\n" + resources.files("nanscope.report").joinpath("page.js").read_text(encoding="utf-8")
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
THREADS = {link for cause in set(Cause) - {Cause.UNKNOWN} for link in explanation(cause).links}  # ours, and public
STYLE = re.compile(r"(left|top):-?[\d.]+%|--columns:\d+;--cell:\d+px")


class Page(HTMLParser):
    """A page taken apart: its text, its elements, and everything about it that is not inert."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.styles: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        if self.open:
            self.faults.append(f"not closed: {self.open}")
        names = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        if len(names) != len(set(names)):
            self.faults.append("an id is used twice")
        links = [attributes["href"] for _, attributes in self.tags if "href" in attributes]
        inside = {f"#{name}" for name in names}
        self.faults += [f"link {link}" for link in links if link not in inside | THREADS]
        self.faults += self._scripted()

    def _scripted(self) -> list[str]:
        """What is wrong with the scripts: there is one, ours, with its data, and the policy names it; or there is none."""
        policies = [tag["content"] for tag in self.all("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
        if not self.scripts:
            return [] if policies in ([], [POLICY]) else [f"policy {policies}"]
        kinds = [kind for kind, _ in self.scripts]
        if kinds != ["application/json", ""] or self.scripts[1][1] != SCRIPT or policies != [f"{POLICY}; script-src 'sha256-{HASH}'"]:
            return [f"scripts {kinds}, policy {policies}"]
        text = self.scripts[0][1]
        json.loads(text, parse_constant=lambda name: self.faults.append(f"{name} in the data"))
        return [f"{sign!r} in the data" for sign in "<>&\u2028\u2029" if sign in text]

    @property
    def text(self) -> str:
        """What one reads, white space folded."""
        return " ".join("".join(self.texts).split())

    def all(self, tag: str, name: str = "") -> list[dict[str, str]]:
        """Return the attributes of all elements of a kind (and class)."""
        return [attributes for found, attributes in self.tags if found == tag and (not name or name in attributes.get("class", "").split())]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag not in ALLOWED:
            self.faults.append(f"element {tag}")
        for name, value in attributes.items():
            if name.startswith("on") or name in ("src", "srcset", "action", "formaction", "xlink:href", "srcdoc"):
                self.faults.append(f"attribute {name}")
            if name == "style" and not STYLE.fullmatch(value):
                self.faults.append(f"style {value}")
            if "<" in value or "alert" in value:
                self.faults.append(f"data in {tag} {name}")
            if "url(" in value and not re.fullmatch(r"url\(#(hatch|cross|gap)-\d+\)", value):
                self.faults.append(f"address {value}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1:]}")
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append((self.tags[-1][1].get("type", ""), data))
            return
        (self.styles if self.open[-1:] == ["style"] else self.texts).append(data)
        self.texts.append(" " if self.open[-1:] in (["td"], ["li"], ["p"], ["dt"], ["dd"], ["th"]) else "")


def odd(page: str) -> set[str]:
    """Characters that a page must not hold: control, bidi, invisible, half a surrogate pair. A tab is one of a patch."""
    return {f"U+{ord(c):04X}" for c in page if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def checked(verdict: Verdict, title: str | None = None) -> Page:
    """Render a verdict, require an inert page, and return it taken apart."""
    text = render_html(verdict, title)
    page = Page(text)
    assert not page.faults, page.faults
    assert not odd(text), odd(text)
    links = "".join(f'"{link}"' for link in THREADS)
    assert all(f'"{link}"' in links for link in re.findall(r'"([^"]*://[^"]*)"', text)) and "@import" not in text
    assert "url(" not in "".join(page.styles)
    assert len(text.encode()) < MOST_BYTES
    return page
