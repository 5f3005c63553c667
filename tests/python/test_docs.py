"""The documentation as a site: it builds without a warning, and every page can be reached."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repo import ROOT, tracked_files


def test_the_site_builds_without_a_warning():
    if not importlib.util.find_spec("mkdocs"):
        pytest.skip("mkdocs is not installed (scripts/extras installs it)")
    done = subprocess.run([str(ROOT / "scripts" / "docs")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    api = (ROOT / "build" / "site" / "api.html").read_text()
    assert "push_pull" in api and "topology" in api


def version_of_the_tree():
    return re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())[1]


CELL_CHARACTERS_MAX = 200
WORDS_MAX = 45_000


def pages():
    return {str(path.relative_to(ROOT)): path.read_text() for path in tracked_files() if path.suffix == ".md"}


def cells_of(text):
    """(line number, cell) of every table; what stands in a fence is no table."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        row = line.strip()
        if row.startswith(("```", "~~~")):
            fence = not fence
        elif row.startswith("|") and not fence:
            for cell in re.split(r"(?<!\\)\|", row.strip("|")):
                yield number, cell.strip()


def test_cells_are_told_from_code():
    text = "| a | b \\| c |\n```\n| code |\n```\n  | d |"
    assert list(cells_of(text)) == [(1, "a"), (1, "b \\| c"), (5, "d")]


def test_no_cell_of_a_table_is_longer_than_a_reader_can_take_in():
    wrong = []
    for page, text in pages().items():
        for number, cell in cells_of(text):
            if len(cell) > CELL_CHARACTERS_MAX:
                wrong.append(f"{page}:{number}: {len(cell)} characters: {cell[:60]}...")
    assert not wrong, "make it prose, several rows, or a page of its own:\n" + "\n".join(wrong)


def test_all_pages_together_can_be_read():
    words = {page: len(text.split()) for page, text in pages().items()}
    longest = sorted(words.items(), key=lambda page: -page[1])[:10]
    assert sum(words.values()) <= WORDS_MAX, f"{sum(words.values())} words in all; most in {longest}"


def test_the_changelog_begins_with_the_version_that_is_built():
    heading = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    version, state = heading[3:].split(", ")
    assert version == version_of_the_tree()
    # A release has its day; what is none says so, here and in the README.
    released = re.fullmatch(r"\d+\.\d+\.\d+", version) is not None
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", state) if released else state == "not released"
    assert f"Version {version}: not released" in (ROOT / "README.md").read_text() or released


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("README.md", r"Version (\S+?)[:,]"),
        ("CITATION.cff", r"(?m)^version: (\S+)"),
        ("SECURITY.md", r"older builds of (\S+)"),
        ("docs/launchers.md", r"hybridps-(\d\S*?)\+torch"),
        ("scripts/wheel", r"hybridps-(\d\S*?)\+torch"),
        ("examples/launchers/jobset.yaml", r"hybridps-server:(\S+)"),
    ],
)
def test_pages_that_name_a_version_name_this_one(page, pattern):
    assert set(re.findall(pattern, (ROOT / page).read_text())) == {version_of_the_tree()}


def test_what_is_installed_says_the_version_of_the_tree():
    hybridps = pytest.importorskip("hybridps")
    info = pytest.importorskip("hybridps._build_info", reason="the extension was never built (scripts/setup)")
    assert hybridps.__version__ == info.VERSION == version_of_the_tree()
    done = subprocess.run([sys.executable, "-m", "hybridps", "--version"], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"hybridps {version_of_the_tree()}\n", done
    server = Path(sys.executable).parent / "hybridps-server"
    if server.exists():
        done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=60)
        assert done.stdout.split()[:2] == ["hybridps-server", version_of_the_tree()], done


def test_what_the_page_of_exceptions_quotes_is_said_by_the_code():
    sources = [*sorted((ROOT / "csrc").rglob("*.cpp")), *sorted((ROOT / "python").rglob("*.py"))]
    code = "".join(path.read_text() for path in sources)
    page = (ROOT / "docs" / "exceptions.md").read_text()
    quotes = [quote for line in page.splitlines() if line.startswith("|") for quote in re.findall(r'"([^"]+)"', line)]
    assert len(quotes) >= 10, quotes
    unsaid = [quote for quote in quotes if quote not in code]
    assert not unsaid, f"docs/exceptions.md quotes what nothing says: {unsaid}"


def test_what_the_page_of_failures_quotes_is_said_by_the_code():
    """Word by word, between what differs from case to case: numbers, ranks, hosts."""
    code = "".join(path.read_text() for path in sorted((ROOT / "csrc").rglob("*.cpp")))
    page = (ROOT / "docs" / "failures.md").read_text().split("## Measured")[0]
    quotes = [quote for line in page.splitlines() if line.startswith("|") for quote in re.findall(r'"([^"]+)"', line)]
    assert len(quotes) >= 5, quotes
    for quote in quotes:
        parts = [part.strip() for part in re.split(r"rank \d+|\(host pid\)|\d[\d.]* ?s?\b", quote)]
        assert any(parts), quote
        assert all(part in code for part in parts), f"docs/failures.md quotes what nothing says: {quote}"


def test_every_decision_that_is_named_has_a_place():
    """Comments and pages say "decision 44": the index of docs/decisions leads there, each link to its heading."""
    folder = ROOT / "docs" / "decisions"
    headings = set()
    for page in folder.glob("[a-z]*.md"):
        for heading in re.findall(r"(?m)^## (\d+ .+)$", page.read_text()):
            headings.add((page.name, re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")))
    links = re.findall(r"\[(\d+)\]\(([a-z-]+\.md)#(\S+?)\)", (folder / "README.md").read_text())
    assert {(page, anchor) for _, page, anchor in links} == headings
    assert all(anchor.startswith(f"{number}-") for number, _, anchor in links)
    known = {int(number) for number, _, _ in links}
    assert known == set(range(1, max(known) + 1))
    wrong = []
    for path in tracked_files():
        if b"\0" in path.read_bytes()[:4096]:
            continue
        text = path.read_text(errors="replace")
        named = [int(number) for number in re.findall(r"\b[Dd]ecisions?\s+\[?(\d+)\b", text)]
        wrong += [f"{path.relative_to(ROOT)}: decision {number}" for number in named if number not in known]
        prefix = "" if path.parent == folder else "decisions/"
        for page, anchor in re.findall(rf"[/(]{prefix}([a-z-]+\.md)#(\d+-[\w-]+)", text):
            if (page, anchor) not in headings:
                wrong.append(f"{path.relative_to(ROOT)}: {page}#{anchor}")
    assert not wrong
