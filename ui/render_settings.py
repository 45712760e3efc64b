"""What the settings mean, and what a change of them costs. Pure."""

from typing import TYPE_CHECKING

from ragblend.ui.render_text import duration, escape, plural, problem, progress, size

if TYPE_CHECKING:
    from ragblend.app.reencoding import Cost

RATIO_WORDS = (
    (0.0, "Nothing is computed again: fastest, and furthest from full prefill."),
    (0.1, "A little is computed again."),
    (0.25, "The usual middle: most of the speed, much of the fidelity."),
    (0.6, "Much is computed again: closer to full prefill, and slower."),
    (1.0, "All is computed again: full prefill's answer, at its price."),
)


def ratio_meaning(ratio: float) -> str:
    """What a share of recomputed tokens does, in words."""
    return next(words for most, words in RATIO_WORDS if ratio <= most)


def cost(found: "Cost") -> str:
    """What saving would take, before it is done."""
    if not found.changed:
        return problem("Nothing has changed.", "info")
    names = ", ".join(name.replace("_", " ") for name in found.changed)
    if not found.encodes_again:
        return problem(f"Changes {names}. Nothing needs to be read again.", "info")
    if not found.passages:
        return problem(f"Changes {names}. The library is empty, so nothing needs to be read again.", "info")
    work = "read, cut and embedded again" if found.cuts_again else "read by the model again"
    took = (
        f" About {duration(found.seconds)} on this device." if found.seconds is not None else _unknown_time()
    )
    return problem(
        f"Changes {names}. {plural(found.documents, 'document')} ({plural(found.passages, 'passage')}) must be {work}."
        f"{took} Until then, questions are answered more slowly.",
        "warning",
    )


def _unknown_time() -> str:
    return " How long that takes was never measured with these settings (`ragblend doctor --profile`)."


def downloading(name: str, done: int, total: int, seconds_left: float | None) -> str:
    """How far a model's download is; total 0: the hub has not said yet how much it is."""
    if not total:
        return problem(f"Asking the hub for {name} …", "info")
    left = f" · {duration(seconds_left)} left" if seconds_left is not None else ""
    share = 100 * done / total
    return (
        f'<div class="rb-queue"><div class="head"><strong>Downloading {escape(name)}</strong>'
        f"<span>{size(done)} of {size(total)}{left}</span></div>{progress(share, 'Bytes downloaded')}</div>"
    )


def saved(again: int) -> str:
    rest = f" {plural(again, 'document')} put in the queue." if again else ""
    return problem(f"Saved.{rest}", "info")
