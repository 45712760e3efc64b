"""`ragblend doctor`: is everything here that is needed, and sound?"""

from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from ragblend.app.cli_common import Cli

MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def doctor(
    cli: Cli,
    profile: Annotated[
        bool, typer.Option("--profile", help="Measure model and disk for `--ratio auto`, and keep that.")
    ] = False,
) -> int:
    """Check environment, device, model, home, store and index: one line a check."""
    from ragblend.app.doctor import examine

    if profile:
        return _profile(cli)
    verdicts = []
    with cli.open() as workspace:
        for verdict in examine(workspace):
            verdicts.append(verdict)
            if not cli.json:  # as they come: loading the model takes a while
                print(
                    f"{MARKS[verdict.status]}  {verdict.name:<13} {verdict.detail}", file=cli.out, flush=True
                )
    healthy = all(verdict.status != "failed" for verdict in verdicts)
    text = "All is well." if healthy else "Something needs you: see the lines marked FAILED."
    cli.result({"ok": healthy, "checks": [verdict.__dict__ for verdict in verdicts]}, text)
    return 0 if healthy else 1


def _profile(cli: Cli) -> int:
    from ragblend.app.cli_progress import progress_bars

    with cli.open() as workspace, progress_bars() as show:
        measured = workspace.engine.profile(partial(show, "measure"))
    grid = measured.prefill
    rows = [
        f"{count:>6} new tokens  " + "".join(f"{row[column]:>9,.0f} ms" for row in grid.prefill_ms)
        for column, count in enumerate(grid.new_tokens)
    ]
    head = "behind             " + "".join(f"{count:>9,} t " for count in grid.cached_tokens)
    tiers = [f"{tier.name}: {tier.bytes_per_s / 1e6:,.0f} MB/s" for tier in measured.tiers]
    lines = [f"Measured {measured.about}:", head, *rows, f"Reads: {', '.join(tiers)}"]
    cli.result(asdict(measured), "\n".join([*lines, "Kept. `ask --ratio auto` uses it."]))
    return 0
