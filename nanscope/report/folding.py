"""How text is folded where it is wider than the terminal: between words, in a long name behind a joint of it, in a command so that it can
still be pasted.

fold("per_token_kl = torch.exp(ref_log_ratio) - 1", 24)     "per_token_kl = torch.exp(", "ref_log_ratio) - 1"
fold("  fix: fill log_ratio with 0 where mask", 26)         "  fix: fill log_ratio with", "  0 where mask"
command("nanscope replay nanscope-runs/latest/step…", 30)   "nanscope replay \\", "nanscope-runs/latest/\\", "step…"
"""

from __future__ import annotations

import re
import shlex

from rich.cells import cell_len, chop_cells
from rich.text import Text

JOINTS = ("/", "_.,:;=([{)]}|+*-&@")  # behind which a name is folded: first where a path is, then where code is
LEAST = 3  # characters that are worth a line of their own


def folded(text: Text, width: int) -> Text:
    """Return a text with the ends of lines that it needs, its styles kept; what follows the first line is indented like that."""
    if all(cell_len(line) <= width for line in text.plain.split("\n")):
        return text
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        indent = _indent(line.plain, width)
        for index, (start, end) in enumerate(_pieces(line.plain, width, len(indent))):
            piece = line[start:end]
            lines.append(Text.assemble(indent, piece) if index else piece)
    found = Text("\n").join(lines)
    found.justify, found.overflow, found.no_wrap, found.end = text.justify, text.overflow, text.no_wrap, text.end
    return found


def fold(text: str, width: int) -> list[str]:
    """Return the lines of a text that are at most so wide."""
    return folded(Text(text), width).plain.split("\n")


def command(words: str, width: int, indent: int = 0) -> list[str]:
    """Return a command as lines at most so wide, which a shell reads as the one that it is.

    indent: blanks before the first line that are not in it, and before every further one that begins with a word. A word that is folded
    goes on in the first column: a blank would end it.
    """
    if cell_len(words) <= width - indent:
        return [words]
    lines, line, room = [], "", width - indent
    for word in shlex.split(words):
        quoted = shlex.quote(word)
        if cell_len(f"{line} {quoted}") <= room - 2:  # of a blank and a backslash
            line = f"{line} {quoted}".lstrip() if not line.strip() else f"{line} {quoted}"
            continue
        if line:
            lines.append(f"{line} \\")
        blanks = " " * indent if cell_len(quoted) <= width - indent - 2 else ""
        *parts, line = [f"{blanks}{part}" for part in _parts(word, width - len(blanks) - 2)]
        lines += [f"{part}\\" for part in parts]
        room = width
    return [*lines, line]


def _parts(word: str, room: int) -> list[str]:
    """A word in parts that are read as the one word, each quoted for itself."""
    if cell_len(shlex.quote(word)) <= room:
        return [shlex.quote(word)]
    fitting = next(length for length in range(len(word) - 1, 0, -1) if length == 1 or cell_len(shlex.quote(word[:length])) <= room)
    cut = _joint(word[:fitting]) or fitting
    return [shlex.quote(word[:cut]), *_parts(word[cut:], room)]


def _indent(line: str, width: int) -> str:
    blanks = line[: len(line) - len(line.lstrip(" "))]
    return blanks if len(blanks) <= width // 3 else ""


def _pieces(line: str, width: int, indent: int) -> list[tuple[int, int]]:
    """Where the parts of a line begin and end, without the blanks between them."""
    found: list[tuple[int, int]] = []
    start, room = 0, max(1, width)
    while cell_len(line[start:].rstrip()) > room:
        end = start + _end(line[start:], room)
        found.append((start, start + len(line[start:end].rstrip())))
        start = end + len(line[end:]) - len(line[end:].lstrip(" "))
        room = max(1, width - indent)
    return [*found, (start, len(line.rstrip()) if found else len(line))]


def _end(rest: str, room: int) -> int:
    """How many characters of a line that is too long stand in its first part."""
    fitting = max(1, len(chop_cells(rest, room)[0]))  # of two cells, where there is one
    lead = len(rest) - len(rest.lstrip(" "))
    blank = rest.rfind(" ", lead, fitting + 1)
    word = re.search(r"\S*", rest[blank + 1 if blank > lead else lead :])
    whole = cell_len(word.group()) if word else 0
    begin = blank + 1 if blank > lead else lead
    if blank > lead and (whole <= room or fitting - begin < room // 2):
        return blank
    cut = begin + _joint(rest[begin:fitting])
    return cut if cut > begin else blank if blank > lead else fitting


def _joint(part: str) -> int:
    """Behind which character of a part of a word it is best folded, 0 where it has no joint."""
    for joints in JOINTS:
        found = max((part.rfind(joint) for joint in joints), default=-1) + 1
        if found >= LEAST:
            return found
    return 0
