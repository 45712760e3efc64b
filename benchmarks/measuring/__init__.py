"""Measures how close fused answers are to full prefill's (`quality`), how fast they start (`ttft`), and tunes by it.

Needs an engine and questions, and knows nothing of the app. Start at `quality.run` and `ttft.run`. Of `benchmarks/`
this folder alone is in the wheel, as `ragblend.measuring`.

Questions come from a file (`data`), the user's documents (`docs_questions`) or a generator (`figure_questions`);
`variants` are the methods to compare. `prefilling` runs them, `metrics` compare answers, `memory` takes the peak, and
`records` keeps a record for each question. `summary` makes rows of the records, and `result_tables`, `plots` and
`report` show rows.
"""
