"""Figures in texts and token ids: found, compared, reported if no passage has them, recomputed as a whole."""

from dataclasses import replace

import pytest
import torch
from benches import Unread, chat

from ragblend.engine.plan import Span, make_plan
from ragblend.engine.prompts.figure_rows import FigureFinder, FigureRows
from ragblend.engine.prompts.figures import contains, figures_in, unsupported_figures
from ragblend.engine.selection.by_attention import whole_figures


@pytest.mark.parametrize(
    ("text", "figure", "is_contained"),
    [
        ("It lists 18,642 accessions.", "18642", True),
        ("18 642 entries", "18,642", True),
        ("kx–7731–b", "KX-7731-B", True),
        ("part 4–1163", "4-1163", True),
        ("in 1914–1918", "1914", True),
        ("the hall 12 400 beds", "400", True),
        ("12\n400", "12400", False),
        ("第41条", "41", True),
        ("٤١ metres", "41", True),
        ("１９２１年", "1921年", True),
        ("It was 41.", "41", True),
        ("the curator MARA DOLVIN", "Mara Dolvin", True),
        ("part 4-1163", "4", False),
        ("41.5 metres", "41", False),
        ("339", "39", False),
        ("6.4", "64", False),
        ("388.00", "38800", False),
        ("388.00 euros", "388", True),
        ("388 euros", "388,00", True),
        ("section 3.00.1", "3", False),
        ("388.01", "388", False),
        ("1.250,00 €", "1,250.00", True),
        ("1,8 Liter", "1.8", True),
        ("on 17 August 2024", "17.08.2024", True),
        ("on 17 August 2024", "17.08.2023", False),
        ("Phạm Nhật Vượng", "Ph", False),
        ("საქართველო", "საქ", False),
    ],
)
def test_figures_match_as_a_whole_in_any_spelling(text, figure, is_contained):
    assert contains(text, figure) is is_contained


def test_figures_exclude_citations_and_list_numbers():
    text = "1. Code KX-7731-B costs 18,642.50 euros [2], at 19:15 on 1931-03-14.\n2) 0471/55821; 4-1163, 50%"
    expected = ["KX-7731-B", "18,642.50", "19:15", "1931-03-14", "0471/55821", "4-1163", "50"]
    assert figures_in(text) == expected


@pytest.mark.parametrize(
    ("answer", "given", "unsupported"),
    [
        ("It has 18 642 entries.", "The catalogue has 18 642 entries.", ()),
        ("Tel 040 123 456", "Call 040 123 456.", ()),
        ("13. März 1921", "12. März 1921", ("13",)),
        ("1. The wall\n2. The roof", "The wall and the roof.", ()),
        ("41m", "41 m", ()),
        ("on March 9th", "on 9 March", ()),
        ("part A41", "part 41", ("A41",)),
        ("It is 339 metres long, since 1921.", "41 metres long, built in 1921.", ("339",)),
        ("It is 41 metres long.", "41 metres long, built in 1921.", ()),
        # Numbers of two cells or lines were one, and those of a range were none.
        ("The value is 345.", "A\tB\n12\n345\n678\n", ()),
        ("In 2019 it was 120.", "2019 120 340", ()),
        ("Room 12 has them.", "In room 12 400 beds stand.", ()),
        ("It holds 1 234 567.", "a\n1\n234\n567\n", ("1 234 567",)),
        ("It lasted from 1914 to 1918.", "The war of 1914–1918", ()),
        ("The war of 1914–1918", "The war of 1914-1918, 1915", ()),
        ("From 9:00 to 17:00.", "Open 9:00-17:00.", ()),
        ("Pages 12 to 15", "pp. 12-15", ()),
        ("Between 10 and 20 grams.", "Use 10–20g.", ()),
        ("part 4", "part 4-1163", ("4",)),
        ("It takes 5–10 days.", "It takes 5-10 days.", ()),
        ("Since 2024–05–17, 4–1163", "on 2024-05-17 of 4-1163", ()),
        ("It takes 5–11 days.", "It takes 5-10 days.", ("5", "11")),
        # Units were cut off the answer's figures only.
        ("It is 20 km away.", "The lake is 20km away.", ()),
        ("It weighs 1.5 kg.", "1.5kg", ()),
        ("It is 20 km away.", "湖は20km離れています。", ()),
        ("on 9 March", "on March 9th", ()),
        ("part 41", "part A41", ("41",)),
        # The whole clause was a figure.
        ("港は1921年に浚渫されました。", "港は1921年にエムス社によって浚渫された。", ()),
        ("港は1922年に浚渫されました。", "港は1921年にエムス社によって浚渫された。", ("1922",)),
        # Codes are equal with and without a hyphen or a blank after their letters.
        ("CP-40, CP40 and CP 40", "the pump CP40", ()),
        ("CP-40, CP40 and CP 40", "the pump CP-40", ()),
        ("CP-40, CP40 and CP 40", "the pump CP 40", ()),
        ("KX7731B", "KX-7731-B", ()),
        ("CP-40, CP41 and CP 40", "the pumps CP400, CP-4 0, XCP40, CP-41-2", ("CP-40", "CP41", "40")),
        ("A41", "A 41 m wall", ("A41",)),
        # Dates are equal in any form; the year and the month of a date are in it.
        ("on 17 August 2024", "am 17.08.2024", ()),
        ("am 17.8.2024 oder 14.08.2024", "on August 14 and 17, 2024", ()),
        ("on 2024-08-17, in 2023", "on Aug 17th, 2024 and 03.05.2023", ()),
        ("in August 2024", "2024-08-17", ()),
        ("on 8/17/2024", "am 17. August 2024", ()),
        ("on 18 August 2024", "am 17.08.2024", ("18",)),
        ("on 17 August 2023", "am 17.08.2024 und 03.05.2023", ("17", "2023")),
        ("on 17.09.2024", "on 17 August 2024", ("17.09.2024",)),
        ("on 17.08.2024", "in 2024 on 17 August", ()),
        ("on 12.5.2024 and 15.5.2024", "12.05.2024-15.05.2024", ()),
        ("on 05.05.2024", "on 5, 12 and 19 May 2024", ()),
        ("The code is 0000.", "on 5 May", ("0000",)),
        ("on 17.08.2024", "on 17 August, not in 2023", ("17.08.2024",)),
        ("on 4 March 2024, 3 April 2024", "03/04/2024", ("4",)),
        ("on 03/04/2024", "4 March 2024", ()),
        ("on 04/03/2024", "03/04/2024", ("04/03/2024",)),
    ],
)
def test_figures_that_the_prompt_lacks_are_unsupported(answer, given, unsupported):
    assert unsupported_figures(answer, given) == unsupported


def test_reports_list_unsupported_figures(llama, monkeypatch):
    engine = llama.engine
    prompt = chat(llama, ["The wall is 41 metres long."])
    prefilled = engine.prefill(prompt, method="full")
    for said, unsupported in (("It is 339 metres.", ("339",)), ("It is 41 metres.", ())):
        monkeypatch.setattr("ragblend.engine.decoding.loop.decode_text", lambda *_, said=said: said)
        assert engine.decode(prefilled, max_new_tokens=1).report.unsupported_figures == unsupported


class Pieces:
    """A tokenizer of given pieces, one token each; a blank before a word is part of it."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)

    def convert_ids_to_tokens(self, token_id):
        return self.pieces[token_id].replace(" ", "Ġ")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((" costs", " 1", "8", ",", "6", "4", " euros"), [" 1", "8", ",", "6", "4"]),
        ((" costs", " 18,64", " euros"), [" 18,64"]),
        ((" on", " 9", " March", " 19", "21", " at"), [" 9", " March", " 19", "21"]),
        (
            (" am", " ", "1", "2", ".", " März", " 19", "21", "."),
            [" ", "1", "2", ".", " März", " 19", "21", "."],
        ),
        (("| ", "4", "-", "11", " |", " 3", "88", " |"), ["4", "-", "11", " 3", "88"]),
        (("第", "4", "1", "条"), ["4", "1"]),
        ((" no", " figure", " here", "."), []),
        ((" 7", "\n", "8"), [" 7", "8"]),
    ],
)
def test_all_tokens_of_a_figure_are_marked(pieces, expected):
    rows = FigureFinder(Pieces(*pieces))(range(len(pieces)))
    assert [piece for piece, is_figure in zip(pieces, rows.is_figure, strict=True) if is_figure] == expected


def test_lines_end_with_sentences_and_segments():
    pieces = (" It", " is", " 1", ".", "5", ".", " Then", " 2", "\n", "3", " next")
    rows = FigureFinder(Pieces(*pieces))(range(len(pieces)), starts=[0, 10])
    assert rows.lines.tolist() == [1] * 6 + [2] * 3 + [3] + [4]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ((" Raum", " Nr", ".", " ", "3", "3", "9"), 1),
        ((" am", " 12", ".", " März"), 1),
        ((" in", " 19", "2", "1", ".", " Then"), 2),
        ((" in", " 1921", ".", " Then"), 2),
        ((" here", ".", " Then"), 2),
    ],
)
def test_dots_of_abbreviations_and_dates_do_not_end_lines(pieces, lines):
    assert FigureFinder(Pieces(*pieces))(range(len(pieces))).lines.max() == lines


@pytest.mark.parametrize(
    ("best", "rows"),
    [(10, [2, 3, 6, 7, 8]), (4, [2, 3]), (3, [2, 3]), (1, [])],
)
def test_whole_figures_are_selected_best_lines_first(best, rows):
    """The question looks at the label in the first line, not at the figure behind it."""
    is_figure = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    lines = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2, 2, 3])
    scores = torch.tensor([0.4, 0.1, 0.0, 0.0, 0.1, 0.0, 0.2, 0.2, 0.2, 0.9])
    plan = make_plan(
        torch.arange(10), (Span(0, 9, Unread()),), 4, 0.5, 0.2, figures=FigureRows(is_figure, lines)
    )
    assert whole_figures(plan, scores, 2.0, best).tolist() == rows
    assert whole_figures(replace(plan, figures=None), scores, 2.0, best).tolist() == []


def test_the_default_method_splits_fewer_figures(llama):
    """Half a number that was recomputed among stale digits was read as another number (41 became 339)."""
    texts = [
        f"The {name} hall is {length} metres long and holds {count} seats for guests who come by train. " * 4
        for name, length, count in (
            ("old", "1041", "18,642"),
            ("new", "2339", "19,060"),
            ("red", "5063", "12,045"),
        )
    ]
    engine = llama.engine
    engine.encode(texts)
    prompt = chat(llama, texts)
    report = engine.prefill(prompt, method="probe-shift", ratio=0.4).report
    rows = engine.runtime.tokenizing.figure_rows(prompt)
    plain = engine.prefill(prompt, method="probe-shift:figure_gain=0", ratio=0.4).report

    def share(served: str) -> float:
        """Of the neighbours within a figure of a stored passage, those of which one is recomputed and one is not."""
        start, stop = prompt.places[1][0], prompt.places[-1][1]
        pairs = [
            served[i : i + 2]
            for i in range(start, stop - 1)
            if rows.is_figure[i] and rows.is_figure[i + 1] and set(served[i : i + 2]) <= {"r", "c"}
        ]
        assert len(pairs) > 10
        return sum(pair in ("rc", "cr") for pair in pairs) / len(pairs)

    assert share(report.served) < share(plain.served)


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.6, 0.9])
def test_the_ratio_holds_for_any_number_of_figures(llama, ratio):
    texts = ["The ferry crosses the river slowly in fog and ice, " * 12 + f"and costs {n}." for n in (7, 8)]
    llama.engine.encode(texts)
    report = llama.engine.prefill(chat(llama, texts), method="probe-shift", ratio=ratio).report
    assert report.recomputed_fraction == pytest.approx(min(ratio, 0.5), abs=0.03)  # the first one is exact


def test_only_figures_are_ranked_by_lines(llama):
    """A passage of numbers alone, and a table of 400 rows: the share is what was asked for."""
    texts = ["1 22 333 4444 " * 40, "\n".join(f"| {n} | {7 * n} |" for n in range(60))]
    llama.engine.encode(texts)
    report = llama.engine.prefill(chat(llama, texts), method="probe-shift", ratio=0.15).report
    assert report.recomputed_fraction == pytest.approx(0.15, abs=0.02)
