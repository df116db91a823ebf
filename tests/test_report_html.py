"""`nanscope.report.html`: the page says what the verdict says, is inert whatever the verdict holds, and never grows beyond its bound."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
from pages import POLICY, Page, checked, odd
from verdicts import KINDS, NASTY, hostile, incident_of, verdict_of

from nanscope.causes import Cause
from nanscope.locate.layout import Layout
from nanscope.replay.reproduction import Reproduction
from nanscope.report.clean import LIMITS, WHOLE
from nanscope.report.headline import lead_and_rest
from nanscope.report.html import MOST_BYTES, render_html
from nanscope.report.page import build
from nanscope.report.tried import groups_of
from nanscope.snapshot.coverage import Gap
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import Link, Row
from nanscope.verdict.incident import Fix, Incident, Note, Picture, Verdict


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_page(kind: str) -> None:
    """Each kind of verdict gives an inert page with its sentence in it, what it means first and the code second."""
    verdict = verdict_of(kind)
    page = checked(verdict)
    if verdict.healthy:
        assert "no non-finite loss, gradient or weight" in page.text
        assert not page.all("article", "") or page.all("article", "healthy")
        return
    incident = verdict.incidents[0]
    folded = re.sub(r"\s+", "", page.text)
    lead, rest = (re.sub(r"\s+", "", half) for half in lead_and_rest(incident, WHOLE))
    assert f"{rest}{lead}" in folded
    for name in (incident.origin.variable, incident.origin.masked_by):
        assert not name or name in page.text
    for row in incident.rows:
        assert row.label in page.text
    for note in incident.notes:
        assert note.text in page.text
    if incident.snapshot:
        assert f"nanscope replay {incident.snapshot}" in page.text


def test_the_order_of_the_sections() -> None:
    """What to change, why, then the evidence, and last what to do next, as a tired reader needs it."""
    verdict = verdict_of("history")
    notes, settings = (Note("logged_loss", "logged 0"),), {"beta": 0.1}
    incident = incident_of("history", framework="TRL", remedies=("no option clamps it",), notes=notes, settings=settings)
    text = render_html(dataclasses.replace(verdict, incidents=(incident,)))
    own = ["In TRL", "Why", "Tokens", "Origin", "Chain", "History", "Replay", "Notes", "Run", "Next"]
    heads = [re.sub(r"<[^>]*>", "", head) for head in re.findall(r"<h3.*?>(.+?)</h3>", text)]
    assert heads == [*own, "Also seen"]  # of the run: that it was said before


def test_the_source_line_is_marked() -> None:
    """One line of the excerpt is marked, and in it the expression that failed."""
    text = render_html(verdict_of("forward masked"))
    marked = re.findall(r'<li class="marked".*?</li>', text)
    assert len(marked) == 1
    assert "<mark>torch.exp(log_ratio)</mark>" in marked[0]
    assert "steps.py:" in text and "in _mask_after" in text


def test_only_the_word_itself_is_marked() -> None:
    """`logps` is not marked inside `old_logps`."""
    incident = incident_of("input")
    source = ((5, "    ratio = old_logps - logps"),)
    origin = dataclasses.replace(incident.origin, op="input", variable="logps", expression="old_logps - logps", line=5, source=source)
    text = render_html(Verdict((dataclasses.replace(incident, origin=origin),)))
    assert "ratio = old_logps - <mark>logps</mark>" in text


def test_masked_or_not_is_said() -> None:
    """By what a token is masked, or that it counts."""
    assert "masked: multiplied by mask = 0" in checked(verdict_of("forward masked")).text
    incident = incident_of()
    counted = dataclasses.replace(incident, origin=dataclasses.replace(incident.origin, masked=False, masked_by=None))
    assert "not masked: the loss counts it" in checked(Verdict((counted,))).text


def test_headroom_has_a_unit() -> None:
    """Nats for an exponent, with its limit; bits of the dtype for everything else."""
    assert "nat: exp overflows above 88.72" in checked(verdict_of("forward masked")).text
    incident = incident_of("input")
    large = dataclasses.replace(incident, origin=dataclasses.replace(incident.origin, op="mul", headroom=3.5, operands=(("x", 2.0),)))
    assert "3.5 bits in float32" in checked(Verdict((large,))).text


def test_the_chain_turns_to_gradients() -> None:
    """The links of the backward part are gradients, after words on the loss that stayed finite; the last item is the harm."""
    incident = incident_of("backward, finite loss")
    kinds = [stop.item.kind for stop in build(Verdict((incident,))).sections[0].way.stops]
    turn = kinds.index("turn")
    assert set(kinds[:turn]) == {"link"} and set(kinds[turn + 1 :]) == {"grad", "end"}
    assert "the loss stays finite" in checked(Verdict((incident,))).text


def test_a_long_chain_keeps_its_ends() -> None:
    """The middle is counted, the first and the last link stay."""
    links = tuple(Link(f"value_{n}", n, math.inf, n > 400) for n in range(1000))
    section = build(Verdict((incident_of(chain=links),))).sections[0]
    items = [stop.item for stop in section.way.stops]
    shown = [item.text for item in items if item.kind in ("link", "grad")]
    assert len(shown) == 60 and shown[0] == "value_0" and shown[-1] == "value_999"
    assert [item.text for item in items if item.kind == "gap"] == ["… 940 more"]


def test_a_file_alone_says_of_no_other_step() -> None:
    """That none was watched would be untrue of the run that it came from."""
    assert "steps watched" not in checked(Verdict((incident_of(),))).text
    assert "9 steps watched" in checked(Verdict((incident_of(),), steps=9)).text


def test_healthy_is_short_and_calm() -> None:
    """No sections, no warning colour in the body, and a note is not told twice."""
    verdict = verdict_of("absorbed")
    page = checked(verdict)
    assert page.text.count(verdict.notes[0].text) == 1
    assert not page.all("ul", "facts") and not [tag for tag in page.tags if "harm" in tag[1].get("class", "").split()]
    assert "12 steps watched" in page.text


@pytest.mark.parametrize(
    ("verdict", "tone"),
    [
        (Verdict(()), "doubt"),
        (Verdict((), steps=3, gaps=(Gap("not-held", "what was let go of"),)), "doubt"),
        (Verdict((), steps=3), "proven"),
        (Verdict((), steps=3, bad_steps=1), "harm"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.status),
)
def test_that_nothing_was_bad_is_as_sure_as_the_verdict(verdict: Verdict, tone: str) -> None:
    """A count of 0 is no comfort where nobody watched."""
    (bad,) = [fact for fact in build(verdict).counts if fact.name == "bad"]
    assert bad.state == verdict.status.tone == tone


def test_several_incidents() -> None:
    """Five are told in full, the next ones in a line, the rest is counted; each full one can be jumped to."""
    one = incident_of()
    page = checked(Verdict(tuple(dataclasses.replace(one, step=n) for n in range(100)), bad_steps=300))
    assert [attributes["id"] for attributes in page.all("article")] == [f"incident-{n}" for n in range(1, 6)]
    links = [attributes["href"] for attributes in page.all("a")]
    assert [link for link in links if re.fullmatch(r"#incident-\d+", link)] == [f"#incident-{n}" for n in range(1, 6)]
    assert "… 35 more" in page.text and "300 bad" in page.text


def test_notes_of_an_incident_are_told_once() -> None:
    """The run repeats them, the page does not."""
    note = Note("logged_loss", "the trainer logged 0.0", 3)
    page = checked(Verdict((incident_of(notes=(note,)),), notes=(note, Note("other", "something else", 4))))
    assert page.text.count(note.text) == 1 and "something else" in page.text


def test_the_title() -> None:
    """By default what happened where; a title of one's own is escaped."""
    assert "nanscope · step 1 · rank 0 · forward" in render_html(verdict_of("forward masked"))
    page = checked(verdict_of("healthy"), title="</title><script>alert(1)</script>")
    assert page.text.count("</title><script>alert(1)</script>") == 2


def test_the_same_verdict_gives_the_same_page() -> None:
    """No clock, no random id."""
    assert render_html(verdict_of("history")) == render_html(verdict_of("history"))


def test_hostile_strings_in_every_field() -> None:
    """Nothing in any field becomes an element, an attribute, a style or a template."""
    page = checked(hostile(), title=NASTY)
    assert "49" not in page.text and "{{ 7*7 }}" in page.text
    assert page.text.count("<img src=x onerror=alert(1)>") > 60
    assert "⟨U+001B⟩[31m" in page.text and "⟨U+202E⟩" in page.text and "⟨U+2066⟩" in page.text


KEPT = ("exp", "fix", "control", "recorded", "float64", "float32")  # words that choose a branch


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "healthy"])
def test_real_verdicts_with_hostile_names(kind: str) -> None:
    """A real incident whose every string is hostile takes every branch of the template."""

    def spoil(value: Any) -> Any:
        if value in KEPT or isinstance(value, Cause | Layout):
            return value
        if isinstance(value, str):
            return f"{value}{NASTY}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{field.name: spoil(getattr(value, field.name)) for field in dataclasses.fields(value)})
        if isinstance(value, tuple):
            return tuple(spoil(item) for item in value)
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        return value

    checked(spoil(verdict_of(kind)))


@pytest.mark.parametrize(
    "planted",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        '<p onclick="alert(1)">x</p>',
        '<p style="background:url(//x)">x</p>',
        '<a href="http://example.org">x</a>',
        '<path fill="url(http://example.org)"/>',
        "<p>open",
        '<p class="x" title="<b>">x</p>',
        "<link rel=stylesheet href=#a>",
    ],
)
def test_the_check_sees_a_planted_fault(planted: str) -> None:
    """The tests above would notice a page that is not inert."""
    text = render_html(verdict_of("healthy"))
    assert not Page(text).faults
    assert Page(text.replace("</main>", f"{planted}</main>")).faults
    assert odd("a\x1bb\u202e") == {"U+001B", "U+202E"}


def test_the_page_forbids_scripts_and_network() -> None:
    """Its own policy denies what escaping should have made impossible."""
    metas = Page(render_html(verdict_of("healthy"))).all("meta")
    policies = [attributes["content"] for attributes in metas if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policies == [POLICY]


def huge(text: str) -> Verdict:
    """Fifty incidents, each larger than anything that a run could make."""
    incident: Incident = hostile(Incident, text, 3)
    noise = tuple(tuple(math.sin(r * 7.1 + c * c) * (math.inf if (r + c) % 5 == 0 else 1) for c in range(400)) for r in range(300))
    incident = dataclasses.replace(
        incident,
        chain=tuple(Link(text, n, math.nan, n > 2500) for n in range(5000)),
        rows=tuple(Row(text, text, kind, 0.5, 1, 3, 0.1, False, text) for kind in ("recorded", "fix", "asked", "control") * 100),
        fixes=tuple(Fix(text, text, text, n % 2 == 0, True) for n in range(500)),
        remedies=(text,) * 500,
        notes=tuple(Note(f"{n}{text}", text, n) for n in range(500)),
        history=tuple(Entry(n, 1, 0.0, None, math.sin(n), n % 7 or math.nan, math.cos(n), n / 9, 88.7 - n / 9) for n in range(5000)),
        environment={f"{n}{text}": text for n in range(500)},
        settings={f"{n}{text}": {text: [text] * 50} for n in range(500)},
        opaque=(text,) * 500,
        step=6000,
        picture=Picture(text, noise, tuple(tuple(c % 2 == 0 for c in range(400)) for _ in range(300)), 150, 200, 0, 0, 300, 400),
        origin=dataclasses.replace(
            incident.origin,
            operands=((text, 1.0),) * 500,
            source=tuple((n, text) for n in range(1000)),
            line=500,
            index=tuple(range(5000)),
            shape=tuple(range(5000)),
        ),
    )
    return Verdict((incident,) * 50, tuple(Note(f"{n}{text}", text, n) for n in range(2000)), 10**9, 10**9, 10**9, text)


@pytest.mark.parametrize("text", ["<" * 20_000, '"' * 20_000, "\u202e" * 20_000, "𝔘" * 20_000, "word " * 5_000])
def test_the_page_is_bounded(text: str) -> None:
    """However much went wrong, and however long its names, a browser opens the page."""
    checked(huge(text))


def test_the_last_limits_hold_alone() -> None:
    """The tightest row of the table is below the bound with room to spare, so that it can be the last."""
    for text in ('"' * 20_000, "𝔘" * 20_000):
        page = build(huge(text), None, LIMITS[-1])
        assert len(page.sections) == LIMITS[-1].incidents
        assert len(render_html(huge(text), text).encode()) < 0.9 * MOST_BYTES


def test_the_replay_table_is_drawn() -> None:
    """Every row of the table of what was tried, one of them the best."""
    page = checked(verdict_of("forward masked"))
    assert len(page.all("tr", "best")) == 1 and "The recorded step reproduces bit for bit." in page.text
    for row in (row for group in groups_of(incident_of()) for row in group.rows):
        for cell in (row.label, row.loss, row.gradients, row.healthy, row.outcome):
            assert cell in page.text


def test_a_fault_that_does_not_come_again_is_said() -> None:
    """Transient faults are told as such."""
    assert "does not reproduce: the fault was transient" in checked(Verdict((incident_of(reproduction=Reproduction(math.inf)),))).text


def test_advice_is_not_proof() -> None:
    """A fix that was not run is listed as advice, and nothing is called proven."""
    advised = Fix("fix_upstream", "go back to the checkpoint before", "train.py:3", False, None)
    page = checked(Verdict((incident_of(fixes=(advised,)),)))
    assert "advised, not run" in page.text and "go back to the checkpoint before" in page.text
    assert "Proven fix" not in page.text and not page.all("tr", "best")


def test_the_next_command_is_quoted() -> None:
    """A path with blanks and quotes is one argument of the shell."""
    incident = incident_of(snapshot="/tmp/a b/step;rm -rf.safetensors")
    assert "nanscope replay '/tmp/a b/step;rm -rf.safetensors'" in checked(Verdict((incident,))).text
