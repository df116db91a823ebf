"""How a run was started: its command line, without what is secret or names a machine, and the commit of its code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePath

MOST = 600  # characters of a command line that are kept
WITHHELD = "…"

_SECRET = frozenset((
    "apikey", "auth", "authorisation", "authorization", "bearer", "cookie", "credential", "credentials", "login", "p", "pass",
    "passphrase", "passwd", "password", "pat", "pw", "pwd", "sas", "secret", "secrets", "sig", "signature", "u",
))  # fmt: skip
_AT_TIMES = frozenset(("key", "token"))  # secret, unless the name says what else they are
_ELSE = frozenset((
    "bos", "dim", "eos", "id", "ids", "len", "level", "max", "mean", "min", "name", "num", "pad", "per", "size", "type", "unk",
))  # fmt: skip
_HEX = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_NAME = re.compile(r"""([\w.\-]+)["']?\s*[=:]\s*["']?""")  # of something that is given, however deep in a word
_VALUE = re.compile(r"""[^\s,;&"'{}\[\]]*""")
_LOOKS_SECRET = re.compile(
    r"(hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|nvapi-|dckr_pat_|pypi-|eyJ)[\w\-]{8,}|\b[0-9a-fA-F]{32,}\b|hooks\.slack"
    r"|://[^\s]*@|\b(?=[\w+/\-]*[0-9])(?=[\w+/\-]*[a-z])(?=[\w+/\-]*[A-Z])[\w+\-]{24,}={0,2}"
)
_PATH = re.compile(r"""(?<![\w.~/:])(?:file://)?(?:~|[A-Za-z]:)?(?:[\\/][^\s,;:"'\[\]{}()\\/]+)+[\\/]?|-I/\S+""")


def command(argv: Sequence[str], home: Path | None = None) -> str:
    """Return a command line as it may be shown to others: of the options that hold a key or a password no value, of absolute paths the end.

    home: the folder in which it was given; what lies in it is shown relative to it.
    """
    words = " ".join(_shown(argv, home or Path.cwd()))
    return words if len(words) <= MOST else words[: MOST - 1] + "…"


def _shown(argv: Sequence[str], home: Path) -> Iterator[str]:
    withheld = False
    for word in (word[:MOST] for word in argv[:MOST]):  # some launchers hand over a whole configuration
        option = _OPTION.fullmatch(word)
        if option is not None:
            withheld = option[1] is None and _is_secret(word)
        elif withheld:
            yield WITHHELD  # and what follows it, up to the next option
            continue
        yield _short(word, home)


_OPTION = re.compile(r"--?[A-Za-z][\w.\-]*(=.*)?", re.DOTALL)


def _is_secret(name: str) -> bool:
    """Is what has this name to be withheld? In the parts of the name, as in `--hub_token`, `trainer.wandb-api-key`, `apiKey`."""
    parts = {part.lower() for part in re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)) if part}
    return not parts.isdisjoint(_SECRET) or (not parts.isdisjoint(_AT_TIMES) and parts.isdisjoint(_ELSE))


def _short(word: str, home: Path) -> str:
    if _LOOKS_SECRET.search(word):
        return WITHHELD
    word = _withheld("".join(sign if sign.isprintable() else " " for sign in word))
    word = _PATH.sub(lambda found: _end(found[0], home), word)
    return f'"{word}"' if " " in word or not word else word


def _withheld(word: str) -> str:
    """A word without the values of the names in it that are secret."""
    parts, done = list[str](), 0
    for found in _NAME.finditer(word):
        if found.start() >= done and _is_secret(found[1]):
            parts += [word[done : found.end()], WITHHELD]
            value = _VALUE.match(word, found.end())
            done = found.end() if value is None else value.end()
    return "".join(parts) + word[done:]


def _end(path: str, home: Path) -> str:
    """The end of an absolute path, or what it is from the folder in which the command was given."""
    plain = PurePath(path)
    if plain.is_absolute() and plain.is_relative_to(home):
        return str(plain.relative_to(home))
    last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    return f"{WITHHELD}/{last}"


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
