"""Checks for packages that only some commands need, before the work begins."""

from importlib.util import find_spec

from ragblend.kvstore.errors import UsageError, install_hint


def check_installed(what: str, packages: tuple[str, ...], extra: str) -> None:
    """Raise UsageError if a package of that extra is missing. what: the feature that needs it, in the message."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{what} cannot be used without {' and '.join(missing)}: run `{install_hint(extra)}`"
        )
