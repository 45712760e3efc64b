"""Adapters between the engine and frameworks, vLLM and Chroma; `import ragblend` loads none of them."""
