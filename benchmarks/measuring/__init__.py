"""Measures how close fused answers are to full prefill's (`quality`) and how fast they start (`ttft`), and tunes.

It needs an engine and questions, and imports nothing of the app. Start at `quality.run` and `ttft.run`. This is the
only folder of `benchmarks/` in the wheel, as `ragblend.measuring`.

Questions come from a file (`data`), the user's documents (`docs_questions`) or a generator (`figure_questions`);
`variants` are the methods to compare. `prefilling` runs them, `metrics` compares answers, `memory` measures the peak,
and `records` saves a record for each question and variant. `summary` turns records into rows, and `result_tables`,
`plots` and `report` show rows.
"""
