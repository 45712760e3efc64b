"""`ragblend bench quality`, `bench ttft` and what `ragblend tune` shares with them: options, questions, one run.

Start at `runs.report_quality` and `runs.report_ttft`; `cli.bench_app` is the command line. What measures is in
`ragblend.measuring`. Nothing heavy is imported before a run.
"""
