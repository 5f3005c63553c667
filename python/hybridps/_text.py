"""Text from outside that may be no UTF-8: host names, paths, variables. Python holds their bytes as lone surrogates."""

import sys


def print_any_text() -> None:
    """From now on print() writes what it cannot encode as an escape, as it does to stderr, and raises nothing."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
