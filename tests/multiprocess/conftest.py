"""Markers, time limits and the check that there is a backend to test. See README.md."""

import importlib.util
import os
import signal

import hidden_marks
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
DEFAULT_TEST_TIMEOUT_S = 240
HIDDEN_MARKS = ("slow", "conformance")

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py", "conformance/*"]
    NO_TORCH = True
else:
    NO_TORCH = False
    import harness

    harness.default_zygote.start()  # imports torch in the background, while pytest imports it for the test modules


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long-running; run with -m slow")
    config.addinivalue_line("markers", "conformance: all of PyTorch's own distributed tests; run with -m conformance")
    config.addinivalue_line("markers", "timeout_s(seconds): limit for one test, instead of 240 s")


def pytest_report_header(config):
    if NO_TORCH:
        return "multiprocess: SKIPPED, torch is not installed in this interpreter (scripts/setup installs it)"
    return f"multiprocess: backend {harness.BACKEND} (HYBRIDPS_TEST_BACKEND)"


def pytest_collection_modifyitems(config, items):
    """Slow and conformance tests run only when -m or a test's own name asks for them."""
    hidden_marks.deselect(config, items, HERE, HIDDEN_MARKS)



def pytest_runtest_setup(item):
    if not str(item.path).startswith(HERE + os.sep):
        return
    if harness.IS_HYBRIDPS and importlib.util.find_spec("hybridps") is None:
        pytest.fail(
            "hybridps is not installed in this interpreter: pip install --no-build-isolation -e . "
            "(HYBRIDPS_TEST_BACKEND=gloo tests the tests without it)",
            pytrace=False,
        )


@pytest.fixture
def all_bytes_go(monkeypatch):
    """For tests that compare bytes between nodes with a formula: nothing goes packed."""
    monkeypatch.setenv("HYBRIDPS_COMPRESS", "off")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not str(item.path).startswith(HERE + os.sep):
        return (yield)
    mark = item.get_closest_marker("timeout_s")
    seconds = (mark.args[0] if mark else DEFAULT_TEST_TIMEOUT_S) * harness.TIME_SCALE

    def expire(signum, frame):
        raise TimeoutError(f"{item.name} took longer than {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def pytest_terminal_summary(terminalreporter):
    """How many of PyTorch's own tests passed, for the README's table."""
    counts = {}
    for outcome in ["passed", "failed", "skipped"]:
        reports = terminalreporter.stats.get(outcome, [])
        counts[outcome] = sum("test_conformance.py::test_of_pytorch" in report.nodeid for report in reports)
    if sum(counts.values()):
        terminalreporter.write_line(
            f"PyTorch's DistributedTest on {harness.BACKEND}: {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} skipped"
        )
