"""The documentation as a site: it builds without a warning, and every page can be reached."""

import importlib.util
import subprocess

import pytest
from repo import ROOT


def test_the_site_builds_without_a_warning():
    if not importlib.util.find_spec("mkdocs"):
        pytest.skip("mkdocs is not installed (scripts/extras installs it)")
    done = subprocess.run([str(ROOT / "scripts" / "docs")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    api = (ROOT / "build" / "site" / "api.html").read_text()
    assert "push_pull" in api and "topology" in api


def test_the_changelog_begins_with_the_version_that_is_built():
    version = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version = "))
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert heading[3:].split(",")[0] == version.split('"')[1]
