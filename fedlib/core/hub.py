"""Hugging Face's hub, asked once: its client's own retries take up to a minute and a half to find no network."""

from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 5.0  # of the one attempt


@contextmanager
def fail_fast() -> Iterator[None]:
    """Inside the block nothing but the local cache is read if the hub does not answer at once."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers(endpoint: str) -> bool:
    """Does the hub answer one request, whatever it says?"""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception:  # requests' or httpx's own, by the hub's version
        return False
    return True
