"""What measures, simulates and explores: not in the wheel, and imported by nothing in it.

Each module with a command line is run from the repository's root: `python -m benchmarks.store --help`.
"""
