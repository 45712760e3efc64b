"""Measures how close fused answers are to full prefill's (`quality`), how fast they start (`ttft`), and tunes by it.

Needs an engine and questions, and knows nothing of the app. Start at `quality.run` and `ttft.run`. Of `benchmarks/`
this folder alone is in the wheel, as `ragblend.measuring`.
"""
