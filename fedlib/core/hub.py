"""Hugging Face's hub, asked once: its client's own retries take up to a minute and a half to find no network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 5.0  # of the one attempt


@contextmanager
def fail_fast() -> Iterator[None]:
    """Read nothing but the local cache inside the block if the hub does not answer at once."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _is_reachable(constants.ENDPOINT)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def unreadable_error(what: str, source: str | Path, error: Exception, otherwise: str) -> Exception:
    """Return ``ValueError`` if ``source`` is here and cannot be read, else ``ConnectionError``.

    ``otherwise`` says what to do where there is no connection.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].split("\x1b")[0].strip()[:300]
    if Path(source).exists():
        return ValueError(f"{what} in {source} cannot be read: {reason} ({type(error).__name__})")
    return offline_error(f"{what} of {str(source)!r} is", error, otherwise)


def offline_error(what: str, error: Exception, otherwise: str) -> ConnectionError:
    """Return the error for ``what`` that is neither cached nor downloadable; ``otherwise`` says what to do."""
    return ConnectionError(f"{what} not cached and could not be downloaded: {otherwise} ({type(error).__name__})")


def _is_reachable(endpoint: str) -> bool:
    """Return whether the hub answers one request, with whatever status."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception:  # requests' or httpx's own, by the hub's version
        return False
    return True
