"""Answers of the bundled model, held to schemas such as people write: all of them parse and keep to theirs.

`SCHEMAS=full pytest tests/engine/test_schemas.py -rP` asks 200 times and prints how it went; else it is 8.
"""

import json
import os
from collections import Counter

import jsonschema
import pytest

from ragblend import Engine, Literal
from ragblend.engine.decoding.grammar import json_grammar
from ragblend.engine.prompts.segments import Message

IS_FULL = os.environ.get("SCHEMAS") == "full"
TEXT, NUMBER, WHOLE, TRUTH = {"type": "string"}, {"type": "number"}, {"type": "integer"}, {"type": "boolean"}


def thing(**properties):
    return {"type": "object", "properties": properties, "required": list(properties)}


def several(items, **limits):
    return {"type": "array", "items": items, **limits}


def choice(*values):
    return {"enum": list(values)}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": thing(value=TEXT, children=several({"$ref": "#/$defs/node"}))},
}
SCHEMAS = {
    "person": thing(name=TEXT, age=WHOLE, email=TEXT),
    "optional": {"type": "object", "properties": {"name": TEXT, "nickname": TEXT, "age": WHOLE}},
    "choice": thing(colour=choice("red", "green", "blue"), sure=TRUTH),
    "list of texts": thing(items=several(TEXT)),
    "list of things": thing(people=several(thing(name=TEXT, age=WHOLE), minItems=1, maxItems=3)),
    "nested": thing(place=thing(city=TEXT, at=thing(lat=NUMBER, lon=NUMBER)), open=TRUTH),
    "nullable": thing(name=TEXT, partner={"anyOf": [TEXT, {"type": "null"}]}),
    "either": {"anyOf": [thing(answer=TEXT), thing(error=TEXT, code=WHOLE)]},
    "bounds": thing(
        score={"type": "integer", "minimum": 1, "maximum": 10}, share={"type": "number", "minimum": 0}
    ),
    "short text": thing(title={"type": "string", "maxLength": 20}, body={"type": "string", "minLength": 5}),
    "date": thing(day={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
    "pattern": thing(number={"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}, code=TEXT),
    "tree": TREE,
    "map": {"type": "object", "additionalProperties": WHOLE},
    "pair": {"type": "array", "prefixItems": [TEXT, WHOLE], "minItems": 2, "items": False},
    "constant": thing(kind={"const": "fact"}, text=TEXT),
    "tagged": {"oneOf": [thing(kind={"const": "cat"}, lives=WHOLE), thing(kind={"const": "dog"}, name=TEXT)]},
    "any object": {"type": "object"},
    "bare list": several(choice("a", "b", "c"), minItems=2, maxItems=5),
    "many keys": thing(**{f"key_{number}": TRUTH for number in range(6)}),
}
QUESTIONS = [
    "Describe the keeper of the lighthouse.",
    "What was in the parcel? Answer as JSON.",
    "List everything that you know of the harbour.",
    "Who is older, Ann or her brother?",
    "Sag mir, wann das Schiff ankommt.",
    "Write a poem about \"quotes\", backslashes \\ and {braces}.",
    "1 + 1 = ?",
    "Repeat the letter a for ever.",
    "船什么时候到？",
    "Do not answer in JSON.",
]  # fmt: skip
ASKED = [(name, question) for name in SCHEMAS for question in QUESTIONS]


@pytest.mark.timeout(7200 if IS_FULL else 300)
def test_every_answer_validates_against_its_schema(smollm2_home):
    engine, ends = Engine.open(home=smollm2_home, device="cpu", dtype="bfloat16"), Counter[str]()
    for number, (name, question) in enumerate(ASKED if IS_FULL else ASKED[::27]):
        prompt = engine.chat([Message("user", (Literal(question),))])
        options = {"temperature": 1.0, "seed": number} if number % 2 else {}
        result = engine.generate(prompt, max_new_tokens=64, grammar=json_grammar(SCHEMAS[name]), **options)
        jsonschema.validate(json.loads(result.text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())
        ends["ended by the model" if result.stopped else "closed at 64 tokens"] += 1
    print(f"{ends.total()} answers parse and keep to their schemas: {dict(ends)}")
