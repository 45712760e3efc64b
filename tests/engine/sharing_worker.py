"""Another machine: encodes passages into a home of its own, and what it shares. Run by test_shared_store.

Arguments: model folder, home, URL of the shared store, passages as JSON. Prints how many were encoded.
"""

import json
import sys

from ragblend import Engine


def main(model: str, home: str, url: str, texts: str) -> None:
    engine = Engine.open(model, home=home, device="cpu", dtype="float32", remote=url)
    print(engine.encode(json.loads(texts)).encoded)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
