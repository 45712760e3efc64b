"""Benches: is the fused answer the answer of a full prefill (`quality`), and how much faster does it start
(`ttft`)?

Start at `quality.run` and `ttft.run`; `cli.bench_app` is the command line. Nothing heavy is imported before
a run.
"""
