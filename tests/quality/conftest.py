"""The fixtures that the benches' tests share with the benchmarks'."""

from bench_fixtures import *  # noqa: F403
