"""Developers' benchmarks and simulations; not in the wheel, and never imported by the product, except for `measuring`.

`measuring` is what `ragblend bench` and `ragblend tune` need: it is installed, and imported, as `ragblend.measuring`.

Run a module with a command line from the repository's root: `python -m benchmarks.store --help`. OpenMP is set up as in
`ragblend`, before torch is imported.
"""

from ragblend.app.openmp import set_thread_spinning

set_thread_spinning()
