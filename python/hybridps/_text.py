"""Text from outside that may be no UTF-8: host names, paths, variables. Python holds their bytes as lone surrogates."""

import re
import sys


def printable(text: str) -> str:
    r"""What core::printable() makes of the same bytes: "\xff"."""
    return re.sub("[\udc80-\udcff]", lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def print_any_text() -> None:
    """From now on print() writes what it cannot encode as an escape, as it does to stderr, and raises nothing."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
