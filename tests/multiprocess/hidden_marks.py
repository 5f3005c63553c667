"""Tests that run only when -m or their own name asks for them."""

import os


def deselect(config, items, folder, marks):
    """Those of `folder` that have one of the marks."""
    asked = config.getoption("-m") or ""
    named = any("::" in argument for argument in config.args)
    kept, dropped = [], []
    for item in items:
        ours = str(item.path).startswith(folder + os.sep)
        hidden = [mark for mark in marks if item.get_closest_marker(mark) and mark not in asked]
        (dropped if ours and hidden and not named else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
