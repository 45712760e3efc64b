"""Fixtures that the tests of benchmarks/ share with those of the benches."""

from bench_fixtures import *  # noqa: F403
