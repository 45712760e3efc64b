"""Packages that only some commands need, asked for before the work begins."""

from importlib.util import find_spec

from ragblend.kvstore.errors import UsageError


def check_installed(what: str, packages: tuple[str, ...], extra: str) -> None:
    """Raise UsageError, naming what needs them, if a package of that extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{what} need {' and '.join(missing)}, which is not installed: pip install 'ragblend[{extra}]'"
        )
