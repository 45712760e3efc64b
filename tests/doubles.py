"""Functions that stand in for others: they fail, or they note their calls. Not a test file."""


def raising(error):
    """A function that always raises this error."""

    def refuse(*arguments, **named):
        raise error

    return refuse


def watch(monkeypatch, owner, name, before):
    """Have before(*arguments) called ahead of each call of owner's function of that name."""
    real = getattr(owner, name)

    def watched(*arguments, **named):
        before(*arguments)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, watched)
