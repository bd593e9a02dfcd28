"""Words in figures: names of classes, runs and methods are drawn as they are, whatever characters they hold."""

import functools
from pathlib import Path

# the first that has a character draws it; those that are not installed are left out
FONTS = (Path(__file__).with_name("fonts.txt")).read_text(encoding="utf-8").splitlines()


def plain(text: object) -> str:
    r"""Return ``text`` as matplotlib draws it literally: ``$`` is no formula, a leading ``_`` hides no legend entry.

    What no installed font can draw is written as its code point, so that two such names stay apart.
    """
    drawn = "".join(c if c == "\n" or drawable(c) else f"U+{ord(c):04X}" for c in str(text)).replace("$", r"\$")
    return f"\u200b{drawn}" if drawn.startswith("_") else drawn


@functools.cache
def drawable(character: str) -> bool:
    """Return whether an installed font of ``FONTS`` has this character."""
    from matplotlib.font_manager import findfont, get_font

    return any(get_font(findfont(font)).get_char_index(ord(character)) for font in fonts())


@functools.cache
def fonts() -> tuple[str, ...]:
    """Return those of ``FONTS`` that are installed; matplotlib brings the first."""
    from matplotlib.font_manager import get_font_names

    return tuple(f for f in FONTS if f in set(get_font_names()))
