"""The explanations: for every cause why it happens, a snippet that shows it, the same snippet mended, and what does not help.

A cause is one Markdown file in `explanations/`, written to be read as it stands:

    # inf_times_zero_mask
    A masked token overflows, and the mask multiplies inf by 0.
    ## Why it happens             prose
    ## The smallest example       a snippet that goes wrong
    ## The right fix              the same snippet mended, and a list of fix classes: `clamp_exponent`: clamp …
    ## What does not help         prose
    ## Where it was seen          a list of links; the one heading that may be missing

Each snippet starts with `import torch`, runs as it stands, and leaves a variable `loss`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources

from nanscope.causes import Cause

HEADINGS = ("Why it happens", "The smallest example", "The right fix", "What does not help", "Where it was seen")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What somebody who did not write the loss needs to know about one cause.

    title:     what it is, in one sentence.
    mechanism: why the values go wrong, in three to six sentences.
    broken:    the smallest snippet that goes wrong, at most 8 lines.
    mended:    the same snippet with the fix that suits it.
    right:     the fix classes that help, each as `id: what to do`, in the order of `causes.CAUSES`.
    wrong:     what is tried often, and why it does not help.
    links:     public threads in which this cause was met; empty if none is known.
    """

    title: str
    mechanism: str
    broken: str
    mended: str
    right: tuple[str, ...]
    wrong: str
    links: tuple[str, ...] = ()


def explanation(cause: Cause) -> Explanation:
    """Return what is known about a cause.

    Raises FileNotFoundError for `Cause.UNKNOWN`, which has none.
    """
    return read(resources.files("nanscope.verdict").joinpath("explanations", f"{cause}.md").read_text(encoding="utf-8"))


def read(page: str) -> Explanation:
    """Take a page apart.

    Raises ValueError if its headings are not those of every page.
    """
    head, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    named = dict(section.split("\n", 1) for section in sections)
    if tuple(named) not in (HEADINGS, HEADINGS[:-1]):
        raise ValueError(f"the headings are {', '.join(named)}, and should be {', '.join(HEADINGS)}")
    why, example, fix, wrong, seen = (named.get(heading, "") for heading in HEADINGS)
    return Explanation(
        title=_prose(head.partition("\n")[2]),
        mechanism=_prose(why),
        broken=_snippet(example),
        mended=_snippet(fix),
        right=_bullets(fix),
        wrong=_prose(wrong),
        links=tuple(link.strip("<>") for link in _bullets(seen)),
    )


def _prose(text: str) -> str:
    """A paragraph as one line, without the marks of code."""
    return " ".join(text.replace("`", "").split())


def _snippet(text: str) -> str:
    return text.partition("```python\n")[2].partition("```")[0]


def _bullets(text: str) -> tuple[str, ...]:
    return tuple(_prose(item) for item in re.split(r"^- ", text.rpartition("```")[2], flags=re.MULTILINE)[1:])
