"""Benchmarks that users run: how close fused answers are to full prefill's (`quality`), and how much faster (`ttft`).

Start at `quality.run` and `ttft.run`; `cli.bench_app` is the command line. Nothing heavy is imported before a run.
"""
