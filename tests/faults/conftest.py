"""The fault suite uses the harness of tests/multiprocess, and its conftest: markers, time limits, hidden marks."""

import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MULTIPROCESS = os.path.join(ROOT, "tests", "multiprocess")
sys.path[:0] = [path for path in (HERE, MULTIPROCESS, os.path.join(ROOT, "scripts")) if path not in sys.path]

spec = importlib.util.spec_from_file_location(
    "hybridps_multiprocess_conftest", os.path.join(MULTIPROCESS, "conftest.py")
)
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
hooks.HERE = HERE  # those hooks look after the tests below their own folder

collect_ignore_glob = getattr(hooks, "collect_ignore_glob", [])
pytest_configure = hooks.pytest_configure
pytest_collection_modifyitems = hooks.pytest_collection_modifyitems
pytest_runtest_setup = hooks.pytest_runtest_setup
pytest_runtest_call = hooks.pytest_runtest_call
