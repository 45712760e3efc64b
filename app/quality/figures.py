"""Questions for figures: passages full of numbers, dates, codes and names, with near misses in the other passages.

Every word here is ours and every figure is drawn by a seeded generator, so a run needs no data file. A *set* is six or
ten passages, each about a thing with a name of its own (the Orbeck Museum, the Saltin Dam). They are of different
topics, whose figures are of the same kinds with like words around them, or, in half of the sets, of a few topics only,
so that several passages say the same of different things. Many have a table of spare parts. Each set is asked
QUESTIONS_A_SET questions, in several orders of its passages.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragblend.app.quality.data import Question

Draw = random.Random
QUESTIONS_A_SET = 8
TWO_FIGURES, TABLES = (7,), (5, 6)  # which of them ask for two figures, and for one in a table
PASSAGES = (6, 10)
FEW_TOPICS = 3
LANGUAGES = ("en", "de")

_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
}
_NAMES = "Darvel Mosken Talren Orbeck Saltin Veldor Quarren Brisco Helmar Nordan Tiversk Kallow"
_FIRST_NAMES = "Mara Jonas Elin Tobias Greta Anton Lena Oskar Ida Henrik Clara Emil Nora Felix"
_LAST_NAMES = "Dolvin Harcken Perrow Steinlau Mevrin Okander Talbrek Vossmer Lindqual Brandow Kessar Ruhnau"
# ruff: noqa: E501
# Topics: a name, then facts as "sentence | question". {n} is the thing's own name; {kind} the figure.
_EN_TOPICS = {
    "the {n} Museum": """
        The museum was founded on {date} in a former school. | On which date was the {n} Museum founded?
        Its catalogue lists {grouped} accessions. | How many accessions does the catalogue of the {n} Museum list?
        The great hall is {tens} metres long and has a glass roof. | How many metres long is the great hall of the {n} Museum?
        A year's ticket costs {money} euros. | How much is a year's ticket of the {n} Museum, in euros?
        The reading room is closed {tens} days a year. | On how many days a year is the reading room of the {n} Museum closed?
        The curator, {person}, answers letters on Mondays. | Who is the curator of the {n} Museum?
        Its oldest coin is kept under {code}. | Under which code is the oldest coin of the {n} Museum kept?""",
    "the {n} Dam": """
        The wall of the dam is {hundreds} metres long at the crest. | How many metres long is the wall of the {n} Dam at the crest?
        It was filled for the first time on {date}. | On which date was the {n} Dam filled for the first time?
        The two turbines give {decimal} megawatts together. | How many megawatts do the turbines of the {n} Dam give together?
        The bottom outlet has the gate {part}, made of cast steel. | Which gate does the bottom outlet of the {n} Dam have?
        Divers inspect the joints every {tens} months. | Every how many months do divers inspect the joints of the {n} Dam?
        Leaks are reported to {telephone}, day and night. | Under which number are leaks of the {n} Dam reported?
        The crest stands at {coordinate} degrees north. | At how many degrees north does the crest of the {n} Dam stand?""",
    "the {n} Ferry": """
        The ferry carries {hundreds} passengers and a few cars. | How many passengers does the {n} Ferry carry?
        The crossing takes {tens} minutes in calm water. | How many minutes does the crossing of the {n} Ferry take?
        The last boat leaves at {clock}. | At what time does the last boat of the {n} Ferry leave?
        A bicycle costs {money} euros extra. | How much does a bicycle cost on the {n} Ferry, in euros?
        Its hull number is {serial}, painted on the bow. | What is the hull number of the {n} Ferry?
        The captain is {person}. | Who is the captain of the {n} Ferry?
        The engine was overhauled on {date}. | On which date was the engine of the {n} Ferry overhauled?""",
    "the {n} Pump": """
        The pump moves {grouped} litres an hour. | How many litres an hour does the {n} Pump move?
        Its impeller is spare part {part}. | Which spare part is the impeller of the {n} Pump?
        The gasket, part {part}, is changed with every second impeller. | Which part is the gasket of the {n} Pump?
        The filter is rinsed every {tens} days. | Every how many days is the filter of the {n} Pump rinsed?
        It runs at {decimal} bar and stops by itself above that. | At how many bar does the {n} Pump run?
        The motor turns {grouped} times a minute. | How many times a minute does the motor of the {n} Pump turn?
        A repair kit costs {money} euros. | How much does a repair kit for the {n} Pump cost, in euros?""",
    "the {n} Library": """
        The library lends {grouped} volumes. | How many volumes does the {n} Library lend?
        Books may be kept for {tens} days. | For how many days may books of the {n} Library be kept?
        A lost card costs {money} euros. | How much does a lost card of the {n} Library cost, in euros?
        Atlases stand in room {hundreds}. | In which room of the {n} Library do atlases stand?
        It closes at {clock} on weekdays. | At what time does the {n} Library close on weekdays?
        The telephone of the desk is {telephone}. | What is the telephone number of the desk of the {n} Library?
        The oldest map has the shelf mark {code}. | Which shelf mark does the oldest map of the {n} Library have?""",
    "the {n} Hut": """
        The hut has beds for {tens} walkers. | For how many walkers does the {n} Hut have beds?
        It stands at {grouped} metres above the sea. | At how many metres above the sea does the {n} Hut stand?
        A night with breakfast is {money} euros. | How much is a night with breakfast in the {n} Hut, in euros?
        The path from the village is {decimal} kilometres long. | How many kilometres long is the path to the {n} Hut?
        The season begins on {date}. | On which date does the season of the {n} Hut begin?
        The warden is {person}. | Who is the warden of the {n} Hut?
        The emergency radio answers to {serial}. | To which call sign does the emergency radio of the {n} Hut answer?""",
    "the {n} Tunnel": """
        The tunnel is {grouped} metres long. | How many metres long is the {n} Tunnel?
        Trains pass at {hundreds} kilometres an hour. | At how many kilometres an hour do trains pass the {n} Tunnel?
        The first train passed on {date}. | On which date did the first train pass the {n} Tunnel?
        The fans are of the type {code}. | Of which type are the fans of the {n} Tunnel?
        There is an exit every {hundreds} metres. | Every how many metres is there an exit in the {n} Tunnel?
        The rock is {percent} percent granite. | How many percent of the rock of the {n} Tunnel are granite?
        The engineer in charge was {person}. | Who was the engineer in charge of the {n} Tunnel?""",
    "the {n} Brewery": """
        The brewery fills {grouped} bottles a week. | How many bottles a week does the {n} Brewery fill?
        The dark beer has {decimal} percent of alcohol. | How many percent of alcohol has the dark beer of the {n} Brewery?
        The mash rests for {tens} minutes. | For how many minutes does the mash of the {n} Brewery rest?
        The copper kettle carries the number {serial}. | Which number does the copper kettle of the {n} Brewery carry?
        A crate costs {money} euros at the gate. | How much does a crate of the {n} Brewery cost at the gate, in euros?
        Tours begin at {clock}. | At what time do tours of the {n} Brewery begin?
        Orders are taken under {telephone}. | Under which number does the {n} Brewery take orders?""",
    "the {n} Observatory": """
        The mirror measures {hundreds} centimetres. | How many centimetres does the mirror of the {n} Observatory measure?
        The dome weighs {decimal} tonnes. | How many tonnes does the dome of the {n} Observatory weigh?
        First light was on {date}. | On which date was first light at the {n} Observatory?
        It lies at {coordinate} degrees of latitude. | At how many degrees of latitude does the {n} Observatory lie?
        The archive holds {grouped} plates. | How many plates does the archive of the {n} Observatory hold?
        The comet of that year was listed as {code}. | As what was the comet listed at the {n} Observatory?
        The director is {person}. | Who is the director of the {n} Observatory?""",
    "the {n} Pool": """
        The pool is {decimal} metres deep at the tower. | How many metres deep is the {n} Pool at the tower?
        The water is kept at {percent} degrees. | At how many degrees is the water of the {n} Pool kept?
        A season ticket is {money} euros. | How much is a season ticket of the {n} Pool, in euros?
        There are {hundreds} lockers. | How many lockers are there in the {n} Pool?
        The chlorine pump is part {part}. | Which part is the chlorine pump of the {n} Pool?
        Swimmers leave the water at {clock}. | At what time do swimmers leave the water of the {n} Pool?
        The lifeguards are reached under {telephone}. | Under which number are the lifeguards of the {n} Pool reached?""",
    "the {n} Mill": """
        The mill grinds {grouped} sacks a year. | How many sacks a year does the {n} Mill grind?
        The wheel is {decimal} metres wide. | How many metres wide is the wheel of the {n} Mill?
        The millstone was cut on {date}. | On which date was the millstone of the {n} Mill cut?
        The wheel's bearing is part {part}. | Which part is the bearing of the wheel of the {n} Mill?
        The miller is {person}. | Who is the miller of the {n} Mill?
        The council holds {percent} percent of the shares. | How many percent of the shares of the {n} Mill does the council hold?
        Rye flour costs {money} euros a sack. | How much does rye flour of the {n} Mill cost a sack, in euros?""",
    "the {n} Bridge": """
        The bridge spans {hundreds} metres. | How many metres does the {n} Bridge span?
        It bears {tens} tonnes and no more. | How many tonnes does the {n} Bridge bear?
        It was opened on {date}. | On which date was the {n} Bridge opened?
        The paint is {code}, a dark green. | Which paint does the {n} Bridge have?
        The bolts are tightened every {tens} weeks. | Every how many weeks are the bolts of the {n} Bridge tightened?
        Its repair cost {grouped} euros. | How many euros did the repair of the {n} Bridge cost?
        The architect was {person}. | Who was the architect of the {n} Bridge?""",
}
_DE_TOPICS = {
    "das Museum {n}": """
        Das Museum wurde am {date} in einer alten Schule gegründet. | An welchem Tag wurde das Museum {n} gegründet?
        Der Katalog nennt {grouped} Stücke. | Wie viele Stücke nennt der Katalog des Museums {n}?
        Die große Halle ist {tens} Meter lang. | Wie viele Meter lang ist die große Halle des Museums {n}?
        Die Jahreskarte kostet {money} Euro. | Wie viel Euro kostet die Jahreskarte des Museums {n}?
        Die älteste Münze liegt unter {code}. | Unter welchem Code liegt die älteste Münze des Museums {n}?""",
    "die Talsperre {n}": """
        Die Mauer der Talsperre ist {hundreds} Meter lang. | Wie viele Meter lang ist die Mauer der Talsperre {n}?
        Zum ersten Mal gefüllt wurde sie am {date}. | An welchem Tag wurde die Talsperre {n} zum ersten Mal gefüllt?
        Die Turbinen leisten zusammen {decimal} Megawatt. | Wie viel Megawatt leisten die Turbinen der Talsperre {n}?
        Der Grundablass hat den Schieber {part}. | Welchen Schieber hat der Grundablass der Talsperre {n}?
        Schäden meldet man unter {telephone}. | Unter welcher Nummer meldet man Schäden an der Talsperre {n}?""",
    "die Fähre {n}": """
        Die Fähre trägt {hundreds} Fahrgäste. | Wie viele Fahrgäste trägt die Fähre {n}?
        Die Überfahrt dauert {tens} Minuten. | Wie viele Minuten dauert die Überfahrt der Fähre {n}?
        Das letzte Boot fährt um {clock} Uhr. | Um wie viel Uhr fährt das letzte Boot der Fähre {n}?
        Kapitän ist {person}. | Wer ist Kapitän der Fähre {n}?
        Am Bug steht die Nummer {serial}. | Welche Nummer steht am Bug der Fähre {n}?""",
    "die Pumpe {n}": """
        Die Pumpe fördert {grouped} Liter in der Stunde. | Wie viele Liter fördert die Pumpe {n} in der Stunde?
        Das Laufrad ist Ersatzteil {part}. | Welches Ersatzteil ist das Laufrad der Pumpe {n}?
        Der Filter wird alle {tens} Tage gespült. | Alle wie viele Tage wird der Filter der Pumpe {n} gespült?
        Sie läuft mit {decimal} bar. | Mit wie viel bar läuft die Pumpe {n}?
        Ein Satz Dichtungen kostet {money} Euro. | Wie viel Euro kostet ein Satz Dichtungen der Pumpe {n}?""",
    "die Bücherei {n}": """
        Die Bücherei verleiht {grouped} Bände. | Wie viele Bände verleiht die Bücherei {n}?
        Bücher darf man {tens} Tage behalten. | Wie viele Tage darf man Bücher der Bücherei {n} behalten?
        Eine verlorene Karte kostet {money} Euro. | Wie viel Euro kostet eine verlorene Karte der Bücherei {n}?
        Atlanten stehen in Raum {hundreds}. | In welchem Raum der Bücherei {n} stehen Atlanten?
        Die Auskunft hat die Nummer {telephone}. | Welche Nummer hat die Auskunft der Bücherei {n}?""",
    "die Hütte {n}": """
        Die Hütte hat Betten für {tens} Wanderer. | Für wie viele Wanderer hat die Hütte {n} Betten?
        Sie steht auf {grouped} Metern. | Auf wie vielen Metern steht die Hütte {n}?
        Der Weg vom Dorf ist {decimal} Kilometer lang. | Wie viele Kilometer lang ist der Weg zur Hütte {n}?
        Die Wirtin ist {person}. | Wer ist die Wirtin der Hütte {n}?
        Eine Nacht kostet {money} Euro. | Wie viel Euro kostet eine Nacht in der Hütte {n}?""",
    "der Tunnel {n}": """
        Der Tunnel ist {grouped} Meter lang. | Wie viele Meter lang ist der Tunnel {n}?
        Der erste Zug fuhr am {date} hindurch. | An welchem Tag fuhr der erste Zug durch den Tunnel {n}?
        Die Lüfter sind vom Typ {code}. | Von welchem Typ sind die Lüfter im Tunnel {n}?
        Alle {hundreds} Meter ist ein Ausgang. | Alle wie viele Meter ist ein Ausgang im Tunnel {n}?
        Das Gestein ist zu {percent} Prozent Granit. | Zu wie viel Prozent ist das Gestein im Tunnel {n} Granit?""",
    "die Brauerei {n}": """
        Die Brauerei füllt {grouped} Flaschen in der Woche. | Wie viele Flaschen füllt die Brauerei {n} in der Woche?
        Das dunkle Bier hat {decimal} Prozent Alkohol. | Wie viel Prozent Alkohol hat das dunkle Bier der Brauerei {n}?
        Die Maische ruht {tens} Minuten. | Wie viele Minuten ruht die Maische der Brauerei {n}?
        Der Kessel trägt die Nummer {serial}. | Welche Nummer trägt der Kessel der Brauerei {n}?
        Führungen beginnen um {clock} Uhr. | Um wie viel Uhr beginnen Führungen in der Brauerei {n}?""",
    "die Sternwarte {n}": """
        Der Spiegel misst {hundreds} Zentimeter. | Wie viele Zentimeter misst der Spiegel der Sternwarte {n}?
        Die Kuppel wiegt {decimal} Tonnen. | Wie viele Tonnen wiegt die Kuppel der Sternwarte {n}?
        Sie liegt auf {coordinate} Grad Breite. | Auf wie viel Grad Breite liegt die Sternwarte {n}?
        Das Archiv hat {grouped} Platten. | Wie viele Platten hat das Archiv der Sternwarte {n}?
        Die Leitung hat {person}. | Wer hat die Leitung der Sternwarte {n}?""",
    "die Brücke {n}": """
        Die Brücke überspannt {hundreds} Meter. | Wie viele Meter überspannt die Brücke {n}?
        Sie trägt {tens} Tonnen. | Wie viele Tonnen trägt die Brücke {n}?
        Eröffnet wurde sie am {date}. | An welchem Tag wurde die Brücke {n} eröffnet?
        Der Anstrich ist {code}. | Welchen Anstrich hat die Brücke {n}?
        Gebaut hat sie {person}. | Wer hat die Brücke {n} gebaut?""",
}


@dataclass(frozen=True)
class _Words:
    """What one language has beside its topics. filler: sentences without figures."""

    topics: dict[str, str]
    parts: Sequence[str]
    filler: Sequence[str]
    table_label: str
    table_head: str
    price_question: str


_WORDS = {
    "en": _Words(
        topics=_EN_TOPICS,
        parts=("valve", "bearing", "hose", "coupling", "float", "spindle", "hinge", "lamp"),
        filler=(
            "The yard is paved and drained towards the river.",
            "Visitors are asked to keep to the marked paths.",
            "In wet years the lower rooms are cleared before the thaw.",
            "The walls were whitewashed and the doors oiled.",
            "A bench stands on the sheltered side, under two lime trees.",
            "Deliveries come by the back gate.",
            "The log is kept by hand and copied every evening.",
            "Nobody lives there, but a lamp burns through the night.",
            "Much of the stone came from a quarry upstream.",
            "The council pays for the upkeep of the road.",
            "Older plans show a second building, which was never begun.",
            "The water is clear except after storms.",
        ),
        table_label="Spare parts in store for {name}:",
        table_head="| spare part | number | price in euros |\n| --- | --- | --- |",
        price_question="What is the price of the {part} for {name}, in euros?",
    ),
    "de": _Words(
        topics=_DE_TOPICS,
        parts=("Ventil", "Lager", "Schlauch", "Kupplung", "Schwimmer", "Spindel", "Scharnier", "Lampe"),
        filler=(
            "Der Hof ist gepflastert und fällt zum Fluss hin ab.",
            "Besucher bleiben bitte auf den markierten Wegen.",
            "In nassen Jahren werden die unteren Räume vor dem Tauwetter geräumt.",
            "Die Wände wurden gekalkt und die Türen geölt.",
            "Auf der windstillen Seite steht eine Bank unter zwei Linden.",
            "Lieferungen kommen durch das hintere Tor.",
            "Das Logbuch wird von Hand geführt und jeden Abend abgeschrieben.",
            "Dort wohnt niemand, aber nachts brennt eine Lampe.",
            "Ein großer Teil der Steine kam aus einem Steinbruch flussaufwärts.",
            "Die Gemeinde zahlt für den Unterhalt der Straße.",
            "Ältere Pläne zeigen ein zweites Gebäude, das nie begonnen wurde.",
            "Das Wasser ist klar, außer nach Stürmen.",
        ),
        table_label="Ersatzteile im Lager, {name}:",
        table_head="| Ersatzteil | Nummer | Preis in Euro |\n| --- | --- | --- |",
        price_question="Wie viel Euro kostet das Ersatzteil {part}, {name}?",
    ),
}


def _tens(draw: Draw, language: str) -> str:
    return str(draw.randint(12, 89))


def _hundreds(draw: Draw, language: str) -> str:
    return str(draw.randint(101, 989))


def _grouped(draw: Draw, language: str) -> str:
    return _marked(f"{draw.randint(1_200, 98_000):,}", language)


def _decimal(draw: Draw, language: str) -> str:
    return _marked(f"{draw.uniform(1.1, 9.9):.1f}", language)


def _percent(draw: Draw, language: str) -> str:
    return _marked(f"{draw.uniform(11, 97):.1f}", language)


def _money(draw: Draw, language: str) -> str:
    return _marked(f"{draw.uniform(4, 900):.2f}", language)


def _coordinate(draw: Draw, language: str) -> str:
    return _marked(f"{draw.uniform(48, 55):.4f}", language)


def _marked(number: str, language: str) -> str:
    """With the language's marks: German swaps point and comma."""
    return number if language == "en" else number.translate(str.maketrans(",.", ".,"))


def _date(draw: Draw, language: str) -> str:
    day, month, year = draw.randint(1, 28), draw.choice(_MONTHS[language].split()), draw.randint(1871, 2019)
    return f"{day} {month} {year}" if language == "en" else f"{day}. {month} {year}"


def _clock(draw: Draw, language: str) -> str:
    return f"{draw.randint(15, 22)}:{draw.choice((10, 15, 20, 25, 35, 40, 50))}"


def _part(draw: Draw, language: str) -> str:
    return f"{draw.randint(1, 9)}-{draw.randint(1000, 1999)}"


def _code(draw: Draw, language: str) -> str:
    letters = "".join(draw.choices("ABDEFGHKLMNPRSTVXZ", k=2))
    return f"{letters}-{draw.randint(1000, 9999)}-{draw.choice('ABCDE')}"


def _serial(draw: Draw, language: str) -> str:
    return f"{draw.choice('ABDEFGHKLMNPRSTVXZ')}{draw.randint(10_000, 99_999)}"


def _person(draw: Draw, language: str) -> str:
    return f"{draw.choice(_FIRST_NAMES.split())} {draw.choice(_LAST_NAMES.split())}"


def _telephone(draw: Draw, language: str) -> str:
    return f"04{draw.randint(10, 99)} {draw.randint(100, 999)}{draw.randint(100, 999)}"


_KINDS: dict[str, Callable[[Draw, str], str]] = {
    "tens": _tens, "hundreds": _hundreds, "grouped": _grouped, "decimal": _decimal, "percent": _percent,
    "money": _money, "coordinate": _coordinate, "date": _date, "clock": _clock, "part": _part, "code": _code,
    "serial": _serial, "person": _person, "telephone": _telephone,
}  # fmt: skip


@dataclass(frozen=True)
class _Thing:
    """What one passage is about: its name, (question, figure) pairs, its prices by spare part, and the passage."""

    name: str
    facts: Sequence[tuple[str, str]]
    prices: dict[str, str]
    text: str


def figure_questions(
    sets: int, orders: int = 2, seed: int = 0, languages: Sequence[str] = LANGUAGES
) -> list[Question]:
    """So many sets, each asked QUESTIONS_A_SET questions in so many orders of its passages.

    A question's `required` are the figures that a right answer holds; `task` says language and kind
    (`en one`, `de several`, ...). The same arguments give the same questions.
    """
    found: list[Question] = []
    for number in range(sets):
        draw = random.Random(f"figures {seed} {number}")
        language = languages[number % len(languages)]
        round_number = number // len(languages)
        things = _things(draw, language, PASSAGES[round_number % 2], few_topics=round_number // 2 % 2 == 1)
        asked = [_asked(draw, language, things, each) for each in range(QUESTIONS_A_SET)]
        for order in range(orders):
            passages = [thing.text for thing in things]
            random.Random(f"order {seed} {number} {order}").shuffle(passages)
            for text, figures, kind in asked:
                answers, where = (", ".join(figures),), f"figures, set {number}, order {order}"
                task = f"{language} {kind}"
                found.append(Question(len(found), text, tuple(passages), answers, None, figures, task, where))
    return found


def _things(draw: Draw, language: str, count: int, few_topics: bool) -> list[_Thing]:
    words = _WORDS[language]
    topics = draw.sample(sorted(words.topics), FEW_TOPICS if few_topics else count)
    taken: set[str] = set()

    def new(kind: str) -> str:
        while (text := _KINDS[kind](draw, language)) in taken:
            pass
        taken.add(text)
        return text

    things = []
    for number, own_name in enumerate(draw.sample(_NAMES.split(), count)):
        topic = topics[number % len(topics)]
        name = topic.format(n=own_name)
        sentences, facts = [], []
        for line in words.topics[topic].strip().splitlines():
            said, question = line.strip().split(" | ")
            kind = said[said.index("{") + 1 : said.index("}")]
            figure = new(kind)
            sentences.append(said.format(**{kind: figure}))
            facts.append((question.format(n=own_name), figure))
        sentences += draw.sample(words.filler, draw.choice((0, 3, 6, 9)))
        draw.shuffle(sentences)
        parts = draw.sample(words.parts, draw.choice((0, 0, 4, 8)))
        rows = [(part, new("part"), new("money")) for part in parts]
        lines = [_capital(name.partition(" ")[2] if language == "en" else name), " ".join(sentences)]
        if rows:
            lines += [words.table_label.format(name=name), words.table_head]
            lines += [f"| {' | '.join(row)} |" for row in rows]
        prices = {part: price for part, _, price in rows}
        things.append(_Thing(name, facts, prices, "\n".join(lines)))
    return things


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _asked(
    draw: Draw, language: str, things: Sequence[_Thing], number: int
) -> tuple[str, tuple[str, ...], str]:
    """A question, the figures of its answer, and its kind: `one`, `table` or `several`."""
    with_table = [thing for thing in things if thing.prices]
    if number in TABLES and with_table:
        thing = draw.choice(with_table)
        part = draw.choice(sorted(thing.prices))
        question = _WORDS[language].price_question.format(part=part, name=thing.name)
        return question, (thing.prices[part],), "table"
    (first, figure), (second, other) = draw.sample(draw.choice(things).facts, 2)
    if number in TWO_FIGURES:
        return f"{first} {second}", (figure, other), "several"
    return first, (figure,), "one"
