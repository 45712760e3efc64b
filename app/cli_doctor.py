"""`ragblend doctor`: is everything here that is needed, and sound?"""

import typer

from ragblend.app.cli_common import Cli, command

MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "doctor")(doctor)


def doctor(cli: Cli) -> int:
    """Check environment, device, model, home, store and index: one line a check."""
    from ragblend.app.doctor import examine

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
