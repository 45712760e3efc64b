"""The tokens of an answer behind a prompt: the loop, weights in few bits, guesses, grammars, text."""
