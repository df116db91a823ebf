"""The atlas as people read it: no cell is lost on the way, sentences count what is there, every form is complete and fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanscope.atlas import atlas
from nanscope.atlas.cells import Atlas
from nanscope.atlas.faults import FAULTS, Kind, Where
from nanscope.atlas.harm import GRADIENT, LEGEND, Harm
from nanscope.atlas.verification import Compared, Disagreement, Verification
from nanscope.errors import NanscopeError
from nanscope.frameworks.paths import PATHS
from nanscope.report.atlas import render_atlas, render_html, render_json, render_text
from nanscope.report.console import WIDTH
from nanscope.report.sheets import sheets
from nanscope.report.takeaways import takeaways, verification_words

NARROW = 80  # the cells fit a terminal of this width
MOST_BYTES = 250_000


@pytest.fixture(scope="module")
def whole() -> Atlas:
    return atlas()


@pytest.fixture(scope="module")
def page(whole: Atlas) -> str:
    return render_html(whole, VERIFICATION)


VERIFICATION = Verification(
    compared=(Compared("trl", "1.17.0", "1.16.0", 2, 139), Compared("liger", "0.8.5", "0.8.5", 1, 70)),
    disagreements=(Disagreement(PATHS[0], FAULTS[4], Harm.MASKED, Harm.LOSS | Harm.MASKED),),
    refused=((PATHS[1], FAULTS[-1], "ValueError: no <b>valid</b> token"), (PATHS[2], FAULTS[-1], "ValueError: no <b>valid</b> token")),
    unreached=((PATHS[3], "has no adapter"),),
    absent=("tinker",),
)


def test_sheets_hold_every_cell(whole: Atlas) -> None:
    """Paths that answer alike were merged and clean columns left out; read back, the sheets give the atlas."""
    found = {(path.name, position): Harm.CLEAN for path in whole.paths for position in range(len(whole.faults))}
    written: list[tuple[str, int]] = []
    for sheet in sheets(whole):
        for block in sheet.blocks:
            for pattern in block.patterns:
                for name in pattern.names:
                    for column, plus, minus in zip(block.columns, pattern.plus, pattern.minus, strict=True):
                        path = f"{sheet.framework}.{name.removesuffix(' †')}"
                        found[path, column.plus], found[path, column.minus] = plus, minus
                        written += {(path, column.plus), (path, column.minus)}
    assert len(written) == len(set(written)), "no cell is shown twice"
    for path, row in zip(whole.paths, whole.cells, strict=True):
        assert row == tuple(found[path.name, position] for position in range(len(row))), path.name
    assert sum(sheet.paths for sheet in sheets(whole)) == len(whole.paths)


def test_a_column_is_shown_for_one_sign_alone() -> None:
    """What happens with A < 0 only is not left out."""
    part = atlas(["verl.geo_mean"], [fault for fault in FAULTS if fault.name.startswith("old −inf masked")])
    assert [harm.code for harm in part.cells[0]] == ["·", "LVM"]
    assert [len(block.columns) for block in sheets(part)[0].blocks] == [1, 0, 0]


def test_patterns_differ_and_columns_show_something(whole: Atlas) -> None:
    """Two lines of a block never say the same, and no column is empty."""
    for sheet in sheets(whole):
        for block in sheet.blocks:
            cells = [(pattern.plus, pattern.minus) for pattern in block.patterns]
            assert len(set(cells)) == len(cells)
            for at in range(len(block.columns)):
                assert any(plus[at] or minus[at] for plus, minus in cells)


def test_text_says_every_path_and_fits(whole: Atlas) -> None:
    """Each path is named once in each block that has something to show, the lines fit, and the cells fit a narrow terminal."""
    text = render_text(whole)
    assert max(map(len, text.splitlines())) <= WIDTH
    flat = " ".join(text.split())
    for code, words in LEGEND.items():
        assert f"{code} {words}" in flat
    for sheet in sheets(whole):
        assert f"{sheet.framework} {sheet.version} · {sheet.paths} path" in flat
    for path in whole.paths:
        assert path.name.partition(".")[2] + " †" * path.supposed in flat, path.name
    cells = [line for line in text.splitlines() if re.fullmatch(r"(      |  A[<>]0 )([·LVM≠]+ *)+", line)]
    assert len(cells) > 150 and max(map(len, cells)) <= NARROW


def test_heads_stand_over_their_cells() -> None:
    """A code stands in the column of its kind, and the kind under its tensor."""
    lines = render_text(atlas(["trl.grpo · beta=0.04 · use_bias"])).splitlines()
    start = next(n for n, line in enumerate(lines) if line.endswith("a fault at a masked token"))
    groups, kinds, _, plus, minus = lines[start + 1 : start + 6]
    at = kinds.index("+200", groups.index("old"))
    assert kinds[groups.index("old") :].startswith("−inf") and kinds[groups.index("ref") :].startswith("−inf")
    assert (plus[at], minus[at : at + 2]) == ("M", "LM") and plus.startswith("  A>0") and minus.startswith("  A<0")


def test_the_first_sentence_counts(whole: Atlas) -> None:
    """How many paths have a bad gradient after a masked overflow, framework by framework, and under how many the loss is finite."""
    position = [
        n for n, f in enumerate(FAULTS) if (f.tensor, f.kind, f.where) == ("old_log_probs", Kind.PLUS, Where.MASKED) and f.advantage
    ]
    assert len(position) == 2
    cells = {path: [row[n] for n in position] for path, row in zip(whole.paths, whole.cells, strict=True) if not path.supposed}
    bad = [path for path, both in cells.items() if any(harm & GRADIENT for harm in both)]
    silent = [path for path in bad if any(harm & GRADIENT and Harm.LOSS not in harm for harm in cells[path])]
    first = takeaways(whole)[0]
    assert f"on {len(cells) - len(bad)} of {len(cells)} paths" in first
    assert f"on {len(bad)} (" in first and f"On {len(silent)} of these" in first
    trl = [path for path in cells if path.framework == "trl"]
    assert f"trl {len([path for path in bad if path in trl])} of {len(trl)}" in first
    assert "unsloth" not in first and "torchtitan" not in first


def test_the_other_sentences(whole: Atlas) -> None:
    """Who is immune, where a NaN vanishes, and who dies of an empty batch; a sentence that counts nothing is not said."""
    _, clamps, immune, vanish, empty = takeaways(whole)
    early = [path for path in whole.paths if path.supposed and "clamp_after_exp" not in path.name]
    late = [path for path in whole.paths if path.supposed and path not in early]
    assert f"before exp, {len(early)} of {len(early)} such paths" in clamps and clamps.endswith(f"after exp, 0 of {len(late)}.")
    assert immune.endswith("of unsloth and torchtitan.")
    hidden = sum(
        any(whole.cell(path.name, f"{name} NaN valid A{sign}0") is Harm.CHANGED for name in NAMES for sign in "<>") for path in REAL
    )
    assert hidden and vanish.startswith(f"On {hidden} of {len(REAL)} paths")
    assert "verl" in empty and "openrlhf" in empty and "trl" not in empty
    assert takeaways(atlas(["torchtitan"], FAULTS[:0])) == ()
    assert takeaways(atlas(["unsloth.bnpo"]))[0].endswith("on the one path.")
    assert "on the one path" not in " ".join(takeaways(atlas(["prime_rl"])))


REAL = [path for path in PATHS if not path.supposed]  # the others have a clamp from nanscope
NAMES = ("policy", "old", "ref", "rollout")


class Tags(HTMLParser):
    """Every tag with its attributes, and the text of the cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "td":
            self.cells.append(data.strip())


def test_the_page_is_complete_in_itself(page: str, whole: Atlas) -> None:
    """No network, no script, small; a link for each framework, and every cell of the sheets."""
    tags = Tags()
    tags.feed(page)
    assert not {name for name, _ in tags.tags} & {"script", "link", "img", "iframe", "object"}
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert len(page.encode()) < MOST_BYTES
    links = {attributes.get("href") for name, attributes in tags.tags if name == "a"}
    assert links == {f"#{attributes['id']}" for name, attributes in tags.tags if name == "article" and "id" in attributes}
    assert len([cell for cell in tags.cells if cell]) == sum(len(b.columns) * len(b.patterns) for s in sheets(whole) for b in s.blocks)
    for sentence in takeaways(whole):
        assert sentence in page.replace("&#39;", "'")


def test_a_cell_with_two_signs_looks_like_the_worse() -> None:
    """Silent outranks loud, loud outranks changed, and clean is last."""
    page = render_html(
        atlas(["trl.grpo"], [fault for fault in FAULTS if fault.name.startswith("old +200 masked") and "=" not in fault.name])
    )
    assert '<td class="silent">M/LM</td>' in page
    page = render_html(atlas(["trl.gmpo"]))
    assert '<td class="loud">LVM/·</td>' in page and '<td class="loud">≠/LVM</td>' in page


def test_what_a_framework_says_is_escaped(page: str) -> None:
    """Errors of a framework are text, whatever is in them."""
    assert "<b>valid</b>" not in page and "&lt;b&gt;valid&lt;/b&gt;" in page


def test_a_verification_says_what_was_compared() -> None:
    """Counts, versions that differ from those of the rows, each disagreement, and what was not compared."""
    words = list(verification_words(VERIFICATION))
    assert words[0] == "trl 1.17.0: 139 cells of 2 paths compared (nanscope's rows were read in 1.16.0)"
    assert words[1] == "liger 0.8.5: 70 cells of 1 path compared"
    assert words[2] == "1 cell disagrees:"
    assert words[3] == f"✗ {PATHS[0].name} | {FAULTS[4].name} | nanscope M | trl LM"
    assert words[4].startswith(f"not compared, empty batch: {PATHS[1].name}, {PATHS[2].name} stop by themselves: ValueError")
    assert words[5] == f"not compared: {PATHS[3].name}: has no adapter"
    assert words[6].endswith("tinker") and len(words) == 7
    assert list(verification_words(replace(VERIFICATION, disagreements=())))[2] == "0 cells disagree"
    nothing = Verification((), (), (), (), ("tinker",))
    assert not any("disagree" in words for words in verification_words(nothing)), "nothing was compared: no agreement is claimed"


@pytest.mark.parametrize("suffix", ["html", "json", "txt"])
def test_every_form_is_written(suffix: str, tmp_path: Path) -> None:
    """The suffix chooses the form; with a verification each says the disagreement."""
    part = atlas(["trl.sapo"])
    render_atlas(part, tmp_path / f"atlas.{suffix}", VERIFICATION)
    text = (tmp_path / f"atlas.{suffix}").read_text(encoding="utf-8")
    assert text == {"html": render_html, "json": render_json, "txt": render_text}[suffix](part, VERIFICATION)
    if suffix == "json":
        data = json.loads(text)
        assert data["verification"]["disagreements"][0]["theirs"] == "LM" and data["takeaways"] == list(takeaways(part))
    else:
        assert "1 cell disagrees" in text


def test_an_unknown_suffix_is_one_clear_error(tmp_path: Path) -> None:
    """Nothing is written."""
    with pytest.raises(NanscopeError, match="png.*html") as caught:
        render_atlas(atlas(["trl.sapo"], FAULTS[:1]), tmp_path / "atlas.png")
    assert caught.value.slug == "unknown-format" and not list(tmp_path.iterdir())
