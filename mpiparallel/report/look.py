"""Colours, words and units that all pictures of a report share.

The colours are Okabe and Ito's ("Color universal design", 2008), made to be told apart by people
who see red and green alike. One thing has one colour in every picture: blues and greens are what a
rank computes or holds, warm ones what it sends, grey is the bubble.
"""

from __future__ import annotations

from collections.abc import Iterable

COMPUTE = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    "weight gradient": "#009e73",
    "optimizer": "#44546a",
    "other compute": "#8a97a8",
}
AXES = {"tp": "#e69f00", "pp": "#d55e00", "dp": "#cc79a7", "world": "#8f6bb0"}
BUBBLE = "#dcdcdc"
OTHER = "#e9dfc6"
INK, FAINT, PAPER = "#1d2733", "#5b6672", "#ffffff"
INKS = ("#ffffff", "#000000")  # of text on a colour

# The kinds of the schedules' actions; a whole backward and its input half look the same.
KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weight gradient",
    "optimizer": "optimizer",
}
# Memory has the colours of the compute that it serves.
MEMORY = {
    "parameters": COMPUTE["forward"],
    "gradients": COMPUTE["backward"],
    "optimizer": COMPUTE["optimizer"],
    "activations": COMPUTE["weight gradient"],
}
NAMES_OF_AXES = {
    "tp": "tensor (tp)",
    "pp": "pipeline (pp)",
    "dp": "data (dp)",
    "world": "all ranks (world)",
}


def text_on(colour: str) -> str:
    """Black or white, whichever is read better on a colour "#rrggbb"."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INKS[0.299 * red + 0.587 * green + 0.114 * blue > 130]


def unit_of_bytes(values: Iterable[float]) -> tuple[float, str]:
    """(how many bytes, name) of the unit that the largest of the values reads well in."""
    largest = max(values, default=0)
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if largest >= size:
            return size, name
    return 1, "bytes"


def bytes_text(value: float) -> str:
    """Short: 36 bytes, 3.54 MB."""
    size, name = unit_of_bytes([value])
    return f"{value:,.0f} bytes" if size == 1 else f"{digits(value / size)} {name}"


def seconds_text(value: float) -> str:
    """Short: 12.3 ms, 1.20 s, 45.0 µs."""
    for size, name in ((1, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{digits(value / size)} {name}"
    return f"{digits(value * 1e6)} µs"


def digits(value: float) -> str:
    """Three digits: 3.54, 35.4, 354."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
