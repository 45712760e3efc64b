"""What measures, simulates and explores: not in the wheel, and imported by nothing in it.

Each module with a command line is run from the repository's root: `python -m benchmarks.store --help`. Threads wait for
each other as in `ragblend`, which is said before torch is loaded.
"""

from ragblend.app.openmp import set_thread_spinning

set_thread_spinning()
