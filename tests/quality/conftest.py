"""Fixtures that the tests of the benches share with those of benchmarks/."""

from bench_fixtures import *  # noqa: F403
