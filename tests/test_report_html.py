"""`nanscope.report.html`: the page says what the verdict says, is inert whatever the verdict holds, and never grows beyond its bound."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from verdicts import KINDS, NASTY, hostile, verdict_of

from nanscope.causes import Cause
from nanscope.report.clean import LIMITS, clean
from nanscope.report.draw import chart_of, outline
from nanscope.report.history import Panel, Scale, Series, panels_of, thin
from nanscope.report.html import MOST_BYTES, render_html
from nanscope.report.map import grid_of
from nanscope.report.page import build
from nanscope.report.tried import groups_of
from nanscope.snapshot.history import Entry
from nanscope.snapshot.observation import Link, Row
from nanscope.verdict.incident import Fix, Incident, Note, Picture, Verdict

ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "header", "main", "footer", "article", "section", "figure", "figcaption", "div", "p",
    "h1", "h2", "h3", "ul", "ol", "li", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "span", "b", "i", "small", "code",
    "mark", "a", "svg", "defs", "pattern", "path", "rect",
}  # fmt: skip
VOID = {"meta"}
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
        self.feed(page)
        self.close()
        if self.open:
            self.faults.append(f"not closed: {self.open}")
        names = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        if len(names) != len(set(names)):
            self.faults.append("an id is used twice")
        links = [attributes["href"] for _, attributes in self.tags if "href" in attributes]
        self.faults += [f"link {link}" for link in links if link.removeprefix("#") not in names or not link.startswith("#")]

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
        (self.styles if self.open[-1:] == ["style"] else self.texts).append(data)
        self.texts.append(" " if self.open[-1:] in (["td"], ["li"], ["p"], ["dt"], ["dd"], ["th"]) else "")


def odd(page: str) -> set[str]:
    """Characters that a page must not hold: control, bidi, invisible, half a surrogate pair."""
    return {f"U+{ord(c):04X}" for c in page if c not in "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def checked(verdict: Verdict, title: str | None = None) -> Page:
    """Render a verdict, require an inert page, and return it taken apart."""
    text = render_html(verdict, title)
    page = Page(text)
    assert not page.faults, page.faults
    assert not odd(text), odd(text)
    assert "://" not in text and "@import" not in text and "url(" not in "".join(page.styles)
    assert len(text.encode()) < MOST_BYTES
    return page


def incident_of(kind: str = "forward masked", **changes: Any) -> Incident:
    return dataclasses.replace(verdict_of(kind).incidents[0], **changes)


# -- what it says ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_page(kind: str) -> None:
    """Each kind of verdict gives an inert page with its sentence in it; code in the sentence is set as code."""
    verdict = verdict_of(kind)
    page = checked(verdict)
    if verdict.healthy:
        assert "no non-finite loss, gradient or weight" in page.text
        assert not page.all("article", "") or page.all("article", "healthy")
        return
    incident = verdict.incidents[0]
    folded = re.sub(r"\s+", "", page.text)
    assert re.sub(r"\s+", "", incident.sentence)[1:] in folded
    for name in (incident.origin.variable, incident.origin.masked_by):
        assert not name or name in page.text
    for row in incident.rows:
        assert row.label in page.text
    for note in incident.notes:
        assert note.text in page.text
    if incident.snapshot:
        assert f"nanscope replay {incident.snapshot}" in page.text


def test_the_order_of_the_sections() -> None:
    """From the origin to what to do next, as a tired reader needs it."""
    verdict = verdict_of("history")
    notes, settings = (Note("logged_loss", "logged 0"),), {"beta": 0.1}
    incident = incident_of("history", framework="TRL", remedies=("no option clamps it",), notes=notes, settings=settings)
    text = render_html(dataclasses.replace(verdict, incidents=(incident,)))
    assert re.findall(r"<h3>(.+?)</h3>", text) == ["Origin", "Chain", "Map", "History", "Replay", "In TRL", "Notes", "Run", "Next"]


def test_the_source_line_is_marked() -> None:
    """One line of the excerpt is marked, and in it the expression that failed."""
    text = render_html(verdict_of("forward masked"))
    marked = re.findall(r'<li class="marked">.*?</li>', text)
    assert len(marked) == 1
    assert "<mark>torch.exp(log_ratio)</mark>" in marked[0]
    assert "verdicts.py:" in text and "in _mask_after" in text


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
    kinds = [item.kind for item in build(Verdict((incident,))).sections[0].chain]
    turn = kinds.index("turn")
    assert set(kinds[:turn]) == {"link"} and set(kinds[turn + 1 :]) == {"grad", "end"}
    assert "the loss stays finite" in checked(Verdict((incident,))).text


def test_a_long_chain_keeps_its_ends() -> None:
    """The middle is counted, the first and the last link stay."""
    links = tuple(Link(f"value_{n}", n, math.inf, n > 400) for n in range(1000))
    section = build(Verdict((incident_of(chain=links),))).sections[0]
    shown = [item.text for item in section.chain if item.kind in ("link", "grad")]
    assert len(shown) == 60 and shown[0] == "value_0" and shown[-1] == "value_999"
    assert [item.text for item in section.chain if item.kind == "gap"] == ["… 940 more"]


def test_healthy_is_short_and_calm() -> None:
    """No sections, no warning colour in the body, and a note is not told twice."""
    verdict = verdict_of("absorbed")
    page = checked(verdict)
    assert page.text.count(verdict.notes[0].text) == 1
    assert not page.all("ul", "facts") and not [tag for tag in page.tags if "harm" in tag[1].get("class", "").split()]
    assert "12 steps watched" in page.text


def test_several_incidents() -> None:
    """Five are told in full, the next ones in a line, the rest is counted; each full one can be jumped to."""
    one = incident_of()
    page = checked(Verdict(tuple(dataclasses.replace(one, step=n) for n in range(100)), bad_steps=300))
    assert [attributes["id"] for attributes in page.all("article")] == [f"incident-{n}" for n in range(1, 6)]
    assert [attributes["href"] for attributes in page.all("a")] == [f"#incident-{n}" for n in range(1, 6)]
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


# -- inert -------------------------------------------------------------------------------------------------------------------------


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
        if value in KEPT or isinstance(value, Cause):
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
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@given(st.text(), st.integers(1, 40))
def test_clean_hides_nothing_and_stays_short(text: str, limit: int) -> None:
    """One line, no character that hides or reorders another, at most `limit` long."""
    cleaned = clean(text, limit)
    assert not odd(cleaned) and "\n" not in cleaned and len(cleaned) <= limit
    assert cleaned.encode().decode() == cleaned


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain − text ℓ", "plain − text ℓ"),
        ("\x1b[2J\x7f", "⟨U+001B⟩[2J⟨U+007F⟩"),
        ("a\n   b", "a b"),
        ("a\tb", "a    b"),
        ("abc\u202edef", "abc⟨U+202E⟩def"),
        ("\ud800", "⟨U+D800⟩"),
        ("x" * 50, "x" * 23 + "…"),
        (None, "None"),
        (412, "412"),
    ],
)
def test_clean(text: object, shown: str) -> None:
    """What people write stays, what deceives is spelled out."""
    assert clean(text, 24) == shown


# -- bounded -----------------------------------------------------------------------------------------------------------------------


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


# -- the map -----------------------------------------------------------------------------------------------------------------------


def picture(height: int, width: int, row: int, column: int, value: float = 120.0, **changes: Any) -> Picture:
    values = tuple(tuple(value if (r, c) == (row, column) else 0.1 * c for c in range(width)) for r in range(height))
    masked = tuple(tuple(c >= width - 2 for c in range(width)) for _ in range(height))
    return dataclasses.replace(Picture("log_ratio", values, masked, row, column, 0, 0, height, width), **changes)


def test_the_map_marks_what_overflows() -> None:
    """An exponent beyond the limit of its dtype is marked although it is finite; the origin is ringed and named."""
    incident = incident_of(picture=picture(4, 9, 2, 7))
    grid = grid_of(incident, 32, 72)
    assert grid is not None and grid.limit == pytest.approx(88.72, abs=0.01)
    assert [(r, c) for r in range(4) for c in range(9) if grid.bad[r][c]] == [(2, 7)]
    assert grid.ring == (2, 7) and grid.count == "1 of 36 shown is beyond the limit, masked"
    page = checked(Verdict((incident,)))
    assert len(page.all("rect", "ring")) == 1 and "[1, 2] 120" in page.text and "4 rows × 9 tokens" in page.text


def test_a_cut_map_is_said_and_keeps_the_origin() -> None:
    """Row and column numbers are those of the whole tensor."""
    incident = incident_of(picture=picture(64, 100, 40, 80, first_row=3, rows=90))
    grid = grid_of(incident, 16, 32)
    assert grid is not None and grid.ring is not None
    assert grid.first_row + grid.ring[0] == 43 and grid.first_column + grid.ring[1] == 80
    assert grid.cut == "rows 35–50 of 90, tokens 64–95 of 100"
    assert "rows 35–50 of 90" not in checked(Verdict((incident_of(picture=picture(3, 4, 1, 1)),))).text


def test_colours_diverge_around_zero() -> None:
    """Sign and size choose the colour; outliers do not wash out the rest; nothing finite takes the colour of harm."""
    values = ((-2.0, -1.0, 0.0, 1.0, 2.0, math.nan, -math.inf),)
    grid = grid_of(incident_of("input", picture=Picture("x", values, None, 0, 5, 0, 0, 1, 7)), 32, 72)
    assert grid is not None
    assert [grid.level(0, c) for c in range(7)] == [-5, -2, 0, 2, 5, None, None]
    assert grid.bad == ((False,) * 5 + (True, True),)
    values = (tuple([1.0] * 40 + [1e30]),)
    grid = grid_of(incident_of("input", picture=Picture("x", values, None, 0, 3, 0, 0, 1, 41)), 32, 72)
    assert grid is not None and grid.saturated and grid.scale == 1.0 and grid.level(0, 40) == 5


@pytest.mark.parametrize("size", [0.0, 1e-320, 5e-324, 1.7e308])
def test_colours_at_the_ends_of_the_range(size: float) -> None:
    """Zeros, subnormals and the largest number have a colour."""
    incident = incident_of("input", picture=Picture("x", ((size, -size),), None, 0, 0, 0, 0, 1, 2))
    grid = grid_of(incident, 32, 72)
    assert grid is not None and grid.level(0, 0) == (5 if size else 0)
    checked(Verdict((incident,)))


@pytest.mark.parametrize("values", [(), ((),), ((None, None),), ((1.0,), (1.0, 2.0))])
def test_odd_pictures_do_not_stop_the_page(values: Any) -> None:
    """Empty, ragged, or with holes."""
    checked(Verdict((incident_of(picture=Picture("x", values, None, 3, 9, 0, 0, 1, 2)),)))


def test_the_outline_covers_exactly_its_cells() -> None:
    """Runs are joined, and nothing else is covered."""
    cells = {(0, 0), (0, 1), (0, 2), (1, 1), (3, 5), (3, 6)}
    runs = re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", outline(cells))
    assert len(runs) == 3
    assert {(int(row), int(column) + n) for column, row, length in runs for n in range(int(length))} == cells


# -- history ---------------------------------------------------------------------------------------------------------------------


def test_the_history_ends_with_the_bad_step() -> None:
    """The exponent of the incident itself is on the chart, above the limit that the entries tell."""
    incident = incident_of("history")
    panels = {panel.title: panel for panel in panels_of(incident)}
    assert list(panels) == ["loss", "gradient norm", "largest exponent", "headroom"]
    exponent = panels["largest exponent"]
    assert exponent.limit == pytest.approx(88.72, abs=0.01)
    masked = next(series for series in exponent.series if series.kind == "masked")
    assert [step for step, _ in masked.points] == [float(step) for step in range(1, 11)]
    assert masked.points[-1][1] > exponent.limit > masked.points[-2][1]
    assert math.isnan(panels["gradient norm"].series[0].points[-1][1])
    text = checked(Verdict((incident,))).text
    assert "exp overflows" in text and "88.72" in text


def test_a_run_without_a_mask_has_one_series() -> None:
    """Where the entries tell no masked tokens, the exponent of the incident belongs to the series of all tokens."""
    before = incident_of("history").history
    entries = tuple(dataclasses.replace(entry, log_ratio_max=entry.log_ratio_max_masked, log_ratio_max_masked=None) for entry in before)
    exponent = next(panel for panel in panels_of(incident_of("history", history=entries)) if panel.title == "largest exponent")
    assert [(series.name, len(series.points)) for series in exponent.series] == [("all tokens", 10), ("masked", 0)]
    assert exponent.series[0].points[-1][1] == pytest.approx(90.0)


def test_a_short_history_is_left_out() -> None:
    """Two steps are the least that a line needs."""
    assert panels_of(incident_of()) == ()
    entries = incident_of("history").history
    assert panels_of(incident_of("history", history=entries[:1])) == ()
    assert panels_of(incident_of("history", history=entries[:2], step=3))
    assert panels_of(incident_of("history", history=entries, step=0)) == ()


def test_what_is_no_number_is_left_out() -> None:
    """A history file is data of anyone: text, lists and booleans in it draw nothing."""
    odd_entries = [Entry("<b>", 0, 0.0), Entry(None, 0, 0.0), Entry(4, 0, 0.0, loss="<b>", grad_norm=[1], headroom=True)]  # type: ignore[arg-type]
    incident = incident_of("history", history=(*odd_entries, *incident_of("history").history))
    for panel in panels_of(incident):
        assert all(type(x) is float for series in panel.series for point in series.points for x in point)
    checked(Verdict((incident,)))


POINTS = st.lists(st.floats(), min_size=1, max_size=900).map(lambda values: [(float(n), v) for n, v in enumerate(values)])


@given(POINTS, st.integers(8, 200))
def test_thinning_keeps_what_matters(points: list[tuple[float, float]], limit: int) -> None:
    """Few points, in order, with both ends, the finite extremes, and a trace of what was not finite."""
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 2) and list(kept) == sorted(kept, key=lambda p: p[0])
    assert {repr(p) for p in kept} <= {repr(p) for p in points}
    assert repr(kept[0]) == repr(points[0]) and repr(kept[-1]) == repr(points[-1])
    if all(math.isfinite(v) for _, v in points):
        assert {min(v for _, v in kept), max(v for _, v in kept)} == {min(v for _, v in points), max(v for _, v in points)}
    else:
        assert any(not math.isfinite(v) for _, v in kept)


@example([(0.0, -1.7e308), (1.0, 1.7e308)], None)
@example([(0.0, 1e-320), (1.0, 1e300)], 0.0)
@given(POINTS, st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_charts_stay_inside_their_frame(points: list[tuple[float, float]], limit: float | None) -> None:
    """Every finite point lies between 0 and 1, whatever the range of the values."""
    panel = Panel("loss", "", (Series("loss", "main", tuple(points)),), limit, "", points[-1][0])
    scale = Scale.of(panel)
    assert all(-1e-9 <= scale.x(x) <= 1 + 1e-9 for x, _ in points)
    assert all(-1e-9 <= scale.y(v) <= 1 + 1e-9 for _, v in points if math.isfinite(v))
    chart = chart_of(panel)
    assert "nan" not in chart.curves[0].line and "inf" not in chart.curves[0].line + chart.curves[0].marks


# -- the replay --------------------------------------------------------------------------------------------------------------------


def test_the_replay_table_is_drawn() -> None:
    """Every row of the table of what was tried, one of them the best."""
    page = checked(verdict_of("forward masked"))
    assert len(page.all("tr", "best")) == 1 and "The recorded step reproduces bit for bit." in page.text
    for row in (row for group in groups_of(incident_of()) for row in group.rows):
        for cell in (row.label, row.loss, row.gradients, row.healthy, row.outcome):
            assert cell in page.text


def test_a_fault_that_does_not_come_again_is_said() -> None:
    """Transient faults are told as such."""
    assert "does not reproduce: the fault was transient" in checked(Verdict((incident_of(reproduces=False),))).text


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
