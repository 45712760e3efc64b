"""Decoding: the loop, its implementations, packed weights, prompt lookup, grammars, sampling, text."""
