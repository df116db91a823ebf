"""The report for an issue on a code host: what happened, the line, the change that mends it, and what was measured, top to bottom.

    ## step 60: torch.exp(ref_log_ratio) overflowed …
    ```diff
    - per_token_kl = torch.exp(ref_log_ratio) - ref_log_ratio - 1
    + per_token_kl = torch.exp(ref_log_ratio.masked_fill(completion_mask == 0, 0.0)) - ref_log_ratio - 1
    ```

Notable: a code host reads text as markup, links and names of people. What comes out of a run stands in code, whose fence is longer than
any in it, or has every sign escaped that could mean something.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from nanscope.causes import Cause
from nanscope.report.chain import chain_of
from nanscope.report.clean import LIMITS, clean, numeral
from nanscope.report.diff import NO_DIFF, rest_of, unified, unmeasured_fix, written_fix
from nanscope.report.headline import RANK_HEADS, calm, consequences_of, facts_of, is_of_a_run, lead_and_rest, rank_rows, resume
from nanscope.report.origin import calculation, element, mask_words, source_of, token_words, where_in
from nanscope.report.segments import segments
from nanscope.report.tried import Tried, best_of, fix_words, groups_of, heads_of, reproduction, tested, unit_of, unmeasured
from nanscope.snapshot.coverage import gap_words
from nanscope.verdict.incident import Incident, Verdict
from nanscope.verdict.sentence import blamed

LIMIT = LIMITS[1]  # an issue is read, and not searched
LISTED = 5  # further bad steps that are named


def render_markdown(verdict: Verdict, picture: str = "", script: tuple[str, str] | None = None) -> str:
    """Return the report as Markdown. picture: the name of a file beside it that is to be shown. script: that of the smallest script that
    fails alike, and what is left in it, in words."""
    lines: list[str] = []
    if not verdict.incidents:
        lines += [f"## {escaped(str(verdict.status)).capitalize()}", "", escaped(calm(verdict, LIMIT.long)), ""]
    for incident in verdict.causes[:1]:
        lines += _incident(incident)
    if picture:
        lines += [f"![the offending tensor and the way there]({picture})", ""]
    if script is not None:
        lines += [f"Run it: [{escaped(script[0])}]({script[0]}), on nothing but torch ({escaped(script[1])}).", ""]
    lines += _others(verdict)
    lines += [f"<sub>{_counts(verdict)}</sub>"]
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """Return words in which nothing is markup, a link, or the name of somebody."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"[\\`*_\[\]|~$]", lambda sign: f"\\{sign.group()}", text)
    text = re.sub(r"(?<=\w)\\_(?=\w)", "_", text) if "\\_\\_" not in text else text  # old_logps is no emphasis
    text = re.sub(r"(@|#|\b(?i:gh-))(?=\w)", r"\1<!-- -->", text)  # GitHub looks for them in the page that is made, where entities are gone
    text = text.replace("#", "&#35;").replace("@", "&#64;").replace("://", "&#58;//")
    text = re.sub(r"^(\s*\d+)([.)])(?=\s)", r"\1\\\2", text).replace("www.", "www&#46;")
    return re.sub(r"^(\s*)([-+=])", r"\1\\\2", text)


def code(text: str) -> str:
    """Return words as code in a line."""
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text or ' '}{pad}{fence}"


def block(lines: Iterable[str], language: str = "") -> list[str]:
    """Return lines as a block of code."""
    text = list(lines)
    fence = "`" * max(3, 1 + max((len(run) for line in text for run in re.findall(r"`+", line)), default=0))
    return [f"{fence}{language}", *text, fence, ""]


def _incident(incident: Incident) -> Iterator[str]:
    place = incident.origin
    lead, rest = lead_and_rest(incident, LIMIT)
    yield from (f"## {escaped(clean(incident.place, 60))}, {escaped(clean(incident.process, 60))}", "")
    for words in (lead, rest):
        if words:
            pieces = (code(piece.text) if piece.code else escaped(piece.text) for piece in segments(words, place, LIMIT))
            yield from ("".join(pieces), "")
    fix = written_fix(incident)
    if fix is not None:
        if (best := best_of(incident)) is not None and best is not fix:
            yield from (f"**Best** {code(clean(best.id, 60))}: {escaped(clean(best.label, LIMIT.text))}; {NO_DIFF}.", "")
        proof = "" if fix is not best else " proven on the recorded step:"
        yield from (f"**Fix** {code(clean(fix.id, 60))},{proof} {escaped(fix_words(fix, unit_of(incident)))}.", "")
        yield from block(unified(fix).splitlines(), "diff")
        yield from (line for words in rest_of(fix, LIMIT.text) for line in (f"And {escaped(words)}, of which there is no diff.", ""))
    elif (best := best_of(incident)) is not None:
        label, result = escaped(clean(best.label, LIMIT.text)), escaped(fix_words(best, unit_of(incident)))
        yield from (f"**Fix** {code(clean(best.id, 60))}: {label}. {result}.", "")
    elif (fix := unmeasured_fix(incident)) is not None:
        yield from (
            f"**Fix** {code(clean(fix.id, 60))}, {escaped(unmeasured(incident))}: {escaped(fix_words(fix, unit_of(incident)))}.",
            "",
        )
        yield from block(unified(fix).splitlines(), "diff")
    yield from _source(incident)
    yield from _table(("", ""), [[escaped(name), escaped(words)] for name, words in _facts(incident)])
    chain = [
        f"{item.text} {item.value}".strip() + (f"   {item.line}" if item.line else "")
        for item in chain_of(incident, LIMIT.chain, LIMIT.text)
    ]
    if chain:
        yield from ("<details><summary>From there to the harm</summary>", "", *block(chain), "</details>", "")
    rows = [(group.title, row) for group in groups_of(incident, LIMIT) for row in group.rows]
    if rows:
        said = reproduction(incident)
        yield from (f"<details><summary>What was tried{': ' + escaped(said) if said else ''}</summary>", "")
        yield from _table(heads_of(incident), [_cells(row) for _, row in rows])
        yield from ("</details>", "")
    if words := resume(incident):
        yield from (f"{words[:1].upper()}{escaped(words[1:])}.", "")
    if incident.snapshot:
        name = re.split(r"[\\/]", clean(incident.snapshot, LIMIT.text))[-1]
        why = f"; {code(f'nanscope explain {incident.cause}')}" if incident.cause is not Cause.UNKNOWN else ""
        yield from (f"Look at it: {code(f'nanscope replay {shlex.quote(name)}')}{why}", "")


def _source(incident: Incident) -> Iterator[str]:
    lines = source_of(incident.origin, 4, LIMIT.text)
    if lines:
        yield from (f"{code(where_in(incident.origin, LIMIT.text))}", "")
        yield from block((f"{number:>5} {'→' if marked else ' '} {words}" for number, words, marked in lines), "python")


def _facts(incident: Incident) -> list[tuple[str, str]]:
    place = incident.origin
    facts = [(fact.name, " ".join(filter(None, (fact.value, fact.detail)))) for fact in facts_of(incident)]
    more = (
        ("computed", calculation(place, LIMIT.text)),
        ("element", element(place)),
        ("token id", token_words(incident.token)),
        ("mask", mask_words(place, LIMIT.text)),
        ("behind it", blamed(incident.blame) if incident.blame is not None else ""),
        ("cause", str(incident.cause)),
        ("tested", tested(incident, LIMIT.text)),
        ("objective", clean(incident.loss_words, LIMIT.text)),
        ("versions", _versions(incident)),
        ("commit", _commit(incident)),
    )
    return [*facts, *((name, clean(words, LIMIT.text)) for name, words in more if words)]


def _versions(incident: Incident) -> str:
    """The packages of the run; no more of what stood around it: an issue is public."""
    known = incident.environment.get("versions", incident.environment)
    pairs = known.items() if isinstance(known, dict) else ()
    return ", ".join(
        f"{name} {version}" for name, version in list(pairs)[: LIMIT.items] if isinstance(version, str) and re.match(r"\d", version)
    )


def _commit(incident: Incident) -> str:
    found = incident.environment.get("commit")
    return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{7,64}", found) else ""


def _cells(row: Tried) -> list[str]:
    return [code(row.id), *map(escaped, (row.label, row.loss, row.gradients, row.healthy, row.outcome))]


def _table(heads: Iterable[str], rows: list[list[str]]) -> Iterator[str]:
    if rows:
        heads = list(heads)
        yield f"| {' | '.join(heads)} |"
        yield f"| {' | '.join('---' for _ in heads)} |"
        yield from (f"| {' | '.join(cell.replace('|', '&#124;') if cell[:1] == '`' else cell for cell in row)} |" for row in rows)
        yield ""


def _others(verdict: Verdict) -> Iterator[str]:
    rest = verdict.causes[1:]
    words = [f"{clean(i.place, 60)}, {clean(i.process, 60)}: {lead_and_rest(i, LIMIT)[0]}" for i in rest[:LISTED]]
    words += [f"{len(rest) - LISTED} more"] if len(rest) > LISTED else []
    words += consequences_of(verdict)[:LISTED]
    words += [clean(note.text, LIMIT.text) for note in verdict.notes[:LISTED]]
    if verdict.gaps:
        words.append(f"not seen: {clean(gap_words(verdict.gaps), LIMIT.text)}")
    if words:
        yield from (*(f"- {escaped(line)}" for line in words), "")
    if verdict.ranks is not None and verdict.incidents:
        rows = rank_rows(verdict.ranks)
        yield from _table(RANK_HEADS, [[escaped(cell) for cell in (row.standing, row.which, row.since, row.how)] for row in rows])


def _counts(verdict: Verdict) -> str:
    parts = [
        f"{numeral(verdict.steps)} steps watched" if is_of_a_run(verdict) else "",
        f"{verdict.bad_steps} bad" if verdict.bad_steps else "",
    ]
    return escaped(", ".join(filter(None, parts)) + f" · nanscope {clean(verdict.version, 40)}")
