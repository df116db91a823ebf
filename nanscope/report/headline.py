"""The headline of a report: the numbers of the strip and the two halves of the sentence, for all renderers."""

from __future__ import annotations

from dataclasses import dataclass

from nanscope.causes import CAUSES
from nanscope.report.clean import Limits, clean, is_finite_number, numeral, real, two
from nanscope.text import spans
from nanscope.verdict.incident import Incident, Verdict
from nanscope.verdict.standing import Ranks, Standing


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of the headline strip. state: "harm", "proven" or ""."""

    name: str
    value: str
    detail: str = ""
    state: str = ""


_STEPPED = {
    "taken": "stepped",
    "skipped": "step skipped",
    "stopped": "run stopped",
    "repaired": "stepped, repaired",
    "replaced": "stepped, replaced",
    "skipped by the trainer": "trainer skipped",
    "skipped by the scaler": "scaler skipped",
    "none": "no step",
}


def facts_of(incident: Incident) -> tuple[Fact, ...]:
    """Return step, rank, phase, sample, loss, gradients, weights and what the optimizer did."""
    finite, state = ("finite", "") if is_finite_number(incident.loss) else ("", "harm" if real(incident.loss) is not None else "")
    facts = [
        Fact("step", clean(incident.step, 24), clean(", ".join(incident.place.split(", ")[1:]), 40)),
        Fact("rank", clean(incident.rank, 24), clean(incident.worker, 40)),
        Fact("phase", clean(incident.phase, 24)),
        *([Fact("sample", incident.sample.place, incident.sample.group)] if incident.sample is not None else []),
        Fact("loss", numeral(incident.loss), finite, state),
    ]
    bad = {}
    for name, words in (("gradients", "weight gradients"), ("weights", "weights")):
        counts = two(incident.reached.get(name))
        if counts is None:
            facts.append(Fact(words, "–", "not looked at"))
            continue
        bad[name], total = counts
        harmed = Fact(words, f"{bad[name]} of {total}", "tensors non-finite", "harm")
        facts.append(harmed if bad[name] else Fact(words, "finite", f"all {total} tensors", "proven"))
    stepped = incident.reached.get("stepped")
    words = _STEPPED.get(str(stepped), clean(stepped or "–", 24))
    facts.append(Fact("optimizer", words, "", "harm" if stepped == "taken" and any(bad.values()) else ""))
    return tuple(facts)


def resume(incident: Incident) -> str:
    """Say from where a run can go on, "" if the step has not reached the weights."""
    bad = two(incident.reached.get("weights"))
    if bad is None or not bad[0] or incident.reached.get("stepped") != "taken":
        return ""
    return f"go on from a checkpoint of before step {clean(incident.step, 24)}: what was saved after it holds non-finite weights"


def lead_and_rest(incident: Incident, limits: Limits) -> tuple[str, str]:
    """Split the sentence of the verdict: what happened, and why and how far it got."""
    sentence = clean(incident.sentence, limits.long)
    if sentence.startswith("the "):  # a sentence that begins with code keeps its first letter
        sentence = f"T{sentence[1:]}"
    known = CAUSES.get(incident.cause)
    titles = (known.title, *known.varieties) if known is not None else ()
    at = max((sentence.find(f". {title[:1].upper()}{title[1:]}") for title in titles), default=-1)
    return (sentence[: at + 1], sentence[at + 2 :]) if at >= 0 else (sentence, "")


def watched_of(verdict: Verdict) -> tuple[Fact, ...]:
    """Return what was watched of a run without incidents, and how much room it left."""
    last = [entry for entry in verdict.history if real(entry.headroom) is not None]
    nearest = min(last, key=lambda entry: real(entry.headroom) or 0.0, default=None)
    kept = len(verdict.history)
    of = f"of the last {kept} steps" if kept < verdict.steps else ""
    facts = [
        Fact("steps", clean(verdict.steps, 24)),
        Fact("backward passes", clean(verdict.backwards, 24)),
        Fact("processes", clean(verdict.processes, 24)),
        Fact("not seen", clean(len(verdict.gaps), 24), state="doubt") if verdict.gaps else None,
        Fact("least headroom", f"{numeral(nearest.headroom)} nat", _words(f"step {clean(nearest.step, 24)}", of)) if nearest else None,
        Fact("headroom now", f"{numeral(last[-1].headroom)} nat", f"step {clean(last[-1].step, 24)}") if last else None,
        Fact("largest gradient norm", numeral(norm), of) if (norm := _largest(verdict)) is not None else None,
    ]
    return tuple(fact for fact in facts if fact is not None)


def is_of_a_run(verdict: Verdict) -> bool:
    """Does a verdict say how many steps were watched? One of a file alone says of no other step."""
    return verdict.steps > 0 or not verdict.incidents


def _words(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _largest(verdict: Verdict) -> float | None:
    return max((norm for entry in verdict.history if (norm := real(entry.grad_norm)) is not None), default=None)


def calm(verdict: Verdict, limit: int = 600) -> str:
    """Return the sentence of a run without incidents, and without the note that it repeats."""
    sentence = verdict.sentence
    for note in verdict.notes:
        sentence = sentence.removesuffix(f"; {note.text}")
    return clean(sentence, limit)


def consequences_of(verdict: Verdict) -> tuple[str, ...]:
    """Return a line for each bad step that spoilt later ones: "steps 51–60: consequences of step 50"."""
    lines = []
    for found in verdict.aftermath:
        span = f"step {found.first}" if found.first == found.last else f"steps {found.first}–{found.last}"
        gappy = f"{found.count} of " if found.count < found.last - found.first + 1 else ""
        words = "a consequence" if found.count == 1 else "consequences"
        saved = next((i.snapshot for i in verdict.incidents if i.consequence_of == found.of and i.snapshot), None)
        lines.append(f"{gappy}{span}: {words} of step {found.of}" + (f" ({clean(saved)})" if saved else ""))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class RankRow:
    """A row of the table of ranks. state: how it is coloured."""

    standing: str
    which: str
    since: str
    how: str
    state: str


RANK_HEADS = ("", "ranks", "since", "how")
_STATES = {Standing.FIRST: "harm", Standing.HEALTHY: "proven", Standing.NOT_ENDED: "doubt", Standing.UNHEARD: "doubt"}


def rank_rows(ranks: Ranks) -> tuple[RankRow, ...]:
    """Return who was first and who followed, a row for each standing."""
    rows = []
    for group in ranks.groups:
        many = f"{spans(group.ranks)} ({len(group.ranks)})" if len(group.ranks) > 1 else spans(group.ranks)
        rows.append(RankRow(str(group.standing), many, group.steps_words, group.came_words, _STATES.get(group.standing, "quiet")))
    return tuple(rows)
