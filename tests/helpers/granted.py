"""What a method asks of an experiment beyond the defaults."""

GRANTED = {"feddf": {"public_fraction": 0.1}}


def granted(method):
    """Fields without which ``method`` refuses to run."""
    return GRANTED.get(method, {})
