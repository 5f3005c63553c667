"""The checkout as a stranger finds it: nothing of the machine it was written on, and a page for every room."""

import os
import re
import stat

import pytest
from repo import CSRC, ROOT, rooms_table, tracked_files

README_LINES_MAX = 75
TEXT = [path for path in tracked_files() if b"\0" not in path.read_bytes()[:4096]]


def test_no_file_names_a_path_of_somebodys_machine():
    # Assembled, so that this file names none. A URL or a relative path may hold the same word in its middle.
    homes = "|".join(("w" + "ork", "r" + "oot", "h" + r"ome/\w+", "U" + r"sers/\w+"))
    private = re.compile(rf"(?<![\w./<-])/(?:{homes})/[\w.]")
    wrong = []
    for path in TEXT:
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if private.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong


def test_no_file_points_outside_the_checkout():
    # A link to ../something in Markdown must exist.
    wrong = []
    for path in TEXT:
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(errors="replace")):
            if "://" in target or target.startswith("mailto:"):
                continue
            place = (path.parent / target).resolve()
            if not place.is_relative_to(ROOT) or not place.exists():
                wrong.append(f"{path.relative_to(ROOT)} -> {target}")
    assert not wrong


def test_readme_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "scripts/demo" in text
    assert "scripts/test" in text


def test_the_first_screen_of_the_readme_has_the_recipe_for_two_machines():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    for part in ("torchrun --nnodes 2", "--master-addr boxa", "/etc/hosts", "pip install .", "hybridps doctor"):
        assert part in first_screen, part


def test_the_table_of_features_is_a_page_of_its_own_and_the_limits_stay():
    readme, features = (ROOT / "README.md").read_text(), (ROOT / "docs" / "features.md").read_text()
    assert "| feature | state |" in features and "| feature | state |" not in readme
    for limit in ("GPU training", "Two nodes", "One machine", "Networks that others can reach", "docs/features.md"):
        assert limit in readme, limit


@pytest.mark.parametrize("room", rooms_table()["rooms"])
def test_every_room_has_a_page(room):
    page = CSRC / "hybridps" / room / "README.md"
    assert page.is_file(), f"{page.relative_to(ROOT)} is missing"
    lines = len(page.read_text().splitlines())
    assert 5 <= lines <= README_LINES_MAX, (
        f"{page.relative_to(ROOT)}: {lines} lines, a page is at most {README_LINES_MAX}"
    )


def test_every_script_is_executable_and_says_what_runs_it():
    scripts = [path for path in tracked_files() if path.parent in (ROOT / "scripts", ROOT / ".ci") and not path.suffix]
    assert {path.name for path in scripts} >= {"setup", "test", "demo", "run"}
    for path in scripts:
        assert os.stat(path).st_mode & stat.S_IXUSR, f"chmod +x {path.relative_to(ROOT)}"
        assert path.read_text().startswith("#!/usr/bin/env "), path


def test_licence_files_are_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]
    assert (ROOT / "NOTICE").is_file()


def test_the_build_stays_portable():
    wrong = []
    flags = re.compile(r"-march=native|-mtune=native|-Ofast|-ffast-math")
    for path in TEXT:
        if path.name == "CMakeLists.txt" or path.suffix in (".cmake", ".toml") or path.name == "CMakePresets.json":
            for line in path.read_text().splitlines():
                if flags.search(line.split("#")[0]):
                    wrong.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert not wrong


def test_the_seeds_of_the_fuzzer_are_a_handful():
    """libFuzzer writes what it finds to the first folder it is given."""
    folders = [path.parent for path in tracked_files() if "seeds" in path.parent.parts]
    assert folders
    assert max(folders.count(folder) for folder in set(folders)) <= 10
