"""Libraries that change the whole process when they are imported or used: here they leave it as they found it."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.hub import fail_fast, offline_error


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Run `datasets` and flwr-datasets without progress bars, remarks or traces.

    Afterwards warning filters, the root logger's level and handlers, the level of `datasets`' logger and its progress
    bars are what they were. Warnings that code inside means for the user are given after the block, not in it.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with warnings.catch_warnings():
        from datasets.utils import logging as remarks

        shows, remarked = remarks.is_progress_bar_enabled(), remarks.get_verbosity()
        remarks.disable_progress_bar()
        remarks.set_verbosity_error()
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            remarks.set_verbosity(remarked)
            if shows:
                remarks.enable_progress_bar()
            root.setLevel(level)
            root.handlers[:] = handlers


def load_public(what: str, otherwise: str, *asked: Any, **more: Any):
    """Load a set by ``datasets.load_dataset(*asked, **more)``; ``ConnectionError`` says what to do ``otherwise``."""
    with silence_libraries():
        from datasets import load_dataset

        try:
            with fail_fast():
                return load_dataset(*asked, **more)
        except Exception as error:  # datasets raises a different class for each way of being offline
            raise offline_error(f"dataset {what} is", error, otherwise) from error
