"""Methods that only the atlas compares: no table of the five papers has a row of theirs."""

import fedlib.methods  # noqa: F401  which reads these files, whichever of them is asked for first
