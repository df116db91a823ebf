"""How a run was started: its command line, without what is secret or names a machine, and the commit of its code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePath

MOST = 600  # characters of a command line that are kept
WITHHELD = "…"

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_COUNTS = re.compile(
    r"tokens\b|token_?(ids?|level|mean|len)|max|min|num|tokenizer|keys\b|key_?(dim|name|size)", re.IGNORECASE
)  # no secrets
_LOOKS_SECRET = re.compile(r"(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)\w{8,}|\b[0-9a-f]{40}\b|://[^/\s]*@")
_HEX = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def command(argv: Sequence[str], home: Path | None = None) -> str:
    """Return a command line as it may be shown to others: of the options that hold a key or a password no value, of absolute paths the end.

    home: the folder in which it was given; what lies in it is shown relative to it.
    """
    words = " ".join(_shown(argv, home or Path.cwd()))
    return words if len(words) <= MOST else words[: MOST - 1] + "…"


def _shown(argv: Sequence[str], home: Path) -> Iterator[str]:
    withheld = False
    for word in argv:
        name, sign, value = word.partition("=")
        is_option = word.startswith("-")
        if withheld and not is_option:
            yield WITHHELD
        elif sign and _is_secret(name):
            yield f"{name}={WITHHELD}"
        else:
            yield f"{name}={_short(value, home)}" if sign else _short(word, home)
        withheld = is_option and not sign and _is_secret(name)


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and _COUNTS.search(name) is None


def _short(word: str, home: Path) -> str:
    if _LOOKS_SECRET.search(word):
        return WITHHELD
    word = "".join(sign if sign.isprintable() else " " for sign in word)
    path = PurePath(word)
    if not path.is_absolute():
        return f'"{word}"' if " " in word or not word else word
    return str(path.relative_to(home)) if path.is_relative_to(home) else f"{WITHHELD}/{path.name}"


def commit(script: str) -> str | None:
    """Return the commit that the folder of a script has checked out, its first 12 digits; None if it is no working tree of git.

    Nothing is run for it: a training process starts no other for a word in a report. What is changed and not committed is not seen.
    """
    try:
        return _commit(Path(script).resolve().parent)
    except (OSError, ValueError):
        return None


@cache  # a run asks at its beginning and at every hit
def _commit(folder: Path) -> str | None:
    for place in (folder, *folder.parents):
        kept = place / ".git"
        if kept.is_file():  # a work tree beside others
            kept = place / kept.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        if (kept / "HEAD").is_file():
            head = (kept / "HEAD").read_text(encoding="utf-8").strip()
            found = _named(kept, head.partition("ref:")[2].strip()) if head.startswith("ref:") else head
            return found[:12] if _HEX.fullmatch(found) else None
    return None


def _named(kept: Path, name: str) -> str:
    """What a branch is at; "" if that is not written anywhere."""
    shared = kept / "commondir"
    folders = (kept, kept / shared.read_text(encoding="utf-8").strip()) if shared.is_file() else (kept,)
    for folder in folders:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
        packed = folder / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else ():
            digits, _, called = line.partition(" ")
            if called == name:
                return digits
    return ""
