"""The arrows between the rooms of csrc/hybridps are those of csrc/rooms.toml, in #includes and in symbols; those
between the packages of python/hybridps are the ones below."""

import ast
import graphlib
import re
import shutil
import subprocess

import pytest
from repo import CSRC, ROOT, rooms_table

TABLE = rooms_table()
ROOMS, OUTSIDE = TABLE["rooms"], TABLE["outside"]
GENERATED = {"hybridps/build_info.h"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TYPE = re.compile(  # that is defined here, nested ones as well: its last name, as in "struct Outbox::Sent : Base {"
    r"^[ \t]*(?:template\s*<[^{};]*>\s*)?(?:struct|class|union|enum(?:\s+(?:class|struct))?)\s+"
    r"(?:alignas\([^)]*\)\s*|\[\[[^\]]*\]\]\s*)*(?:\w+::)*(\w+)\b(?:\s+final)?\s*(?::(?!:)[^;{]*)?\{",
    re.MULTILINE,
)
SOURCES = sorted(path for kind in ("*.h", "*.cpp") for path in (CSRC / "hybridps").rglob(kind))

PACKAGES = {"limits": set(), "backend": {"limits"}, "training": {"backend"}, "tools": {"backend", "limits"}}


def room_of(path: str) -> str | None:
    """The innermost room that holds a path below csrc/hybridps."""
    parts = path.split("/")[:-1]
    while parts:
        if "/".join(parts) in ROOMS:
            return "/".join(parts)
        parts.pop()
    return None


def includes(path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


def test_the_table_has_no_cycle_and_lists_a_room_after_what_it_uses():
    seen = set()
    for room, uses in ROOMS.items():
        assert set(uses) <= seen, f"{room} uses {sorted(set(uses) - seen)}, listed below it or nowhere"
        seen.add(room)


def test_the_page_of_how_it_works_lists_every_room():
    rows = [line for line in (ROOT / "docs" / "architecture.md").read_text().splitlines() if line.startswith("| `")]
    named = {room for line in rows for room in re.findall(r"`([\w/]+)`", line.split("|")[1])}
    assert set(ROOMS) <= named, f"docs/architecture.md lacks {sorted(set(ROOMS) - named)}"


def test_every_source_file_is_in_a_room():
    assert SOURCES
    homeless = [
        str(path.relative_to(CSRC)) for path in SOURCES if not room_of(str(path.relative_to(CSRC / "hybridps")))
    ]
    assert not homeless


def test_every_source_file_includes_its_header_first():
    """So the header compiles alone; the target "headers" compiles only those without a source file."""
    wrong = []
    for path in SOURCES:
        header = path.with_suffix(".h")
        if path.suffix == ".cpp" and header.exists() and includes(path)[0] != ('"', str(header.relative_to(CSRC))):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


def test_every_include_follows_an_allowed_arrow():
    wrong = []
    for path in SOURCES:
        room = room_of(str(path.relative_to(CSRC / "hybridps")))
        for _, target in includes(path):
            if not target.startswith("hybridps/") or target in GENERATED:
                continue
            other = room_of(target.removeprefix("hybridps/"))
            if other is None or (other != room and other not in ROOMS[room]):
                wrong.append(f"{path.relative_to(ROOT)} ({room}) includes {target} ({other})")
    assert not wrong, "csrc/rooms.toml does not allow:\n" + "\n".join(wrong)


def test_every_allowed_arrow_is_used():
    used = {room: set() for room in ROOMS}
    for path in SOURCES:
        room = room_of(str(path.relative_to(CSRC / "hybridps")))
        used[room] |= {room_of(target.removeprefix("hybridps/")) for _, target in includes(path)}
    unused = {room: sorted(set(allowed) - used[room]) for room, allowed in ROOMS.items() if set(allowed) - used[room]}
    assert not unused, f"csrc/rooms.toml allows what no file includes: {unused}"


def test_every_include_of_our_own_names_a_file_by_its_full_path():
    wrong = []
    for path in SOURCES:
        for quote, target in includes(path):
            if quote == '"' and target not in GENERATED and not (CSRC / target).is_file():
                wrong.append(f'{path.relative_to(ROOT)}: #include "{target}"')
    assert not wrong


def test_no_type_has_the_name_of_another_rooms_type():
    """So a name says what is meant, wherever it is read or searched for."""
    found = {}
    for path in SOURCES:
        room = room_of(str(path.relative_to(CSRC / "hybridps")))
        for name in TYPE.findall(path.read_text()):
            found.setdefault(name, {}).setdefault(room, set()).add(str(path.relative_to(ROOT)))
    assert len(found) > 400
    wrong = []
    for name, by_room in sorted(found.items()):
        if len(by_room) > 1:
            wrong.append(f"{name}: {', '.join(sorted(set().union(*by_room.values())))}")
    assert not wrong, "names of types in more than one room:\n" + "\n".join(wrong)


@pytest.mark.parametrize("prefix", OUTSIDE)
def test_only_the_rooms_at_the_seam_include_the_outside(prefix):
    wrong = []
    for path in SOURCES:
        room = room_of(str(path.relative_to(CSRC / "hybridps")))
        if room not in OUTSIDE[prefix] and any(target.startswith(prefix) for _, target in includes(path)):
            wrong.append(f"{path.relative_to(ROOT)} ({room})")
    assert not wrong, f"only {OUTSIDE[prefix]} may include <{prefix}...>"


def static_libraries():
    found = {}
    for room in ROOMS:
        name = f"libhybridps_{room.replace('/', '_')}.a"
        built = sorted(ROOT.glob(f"build/*/csrc/hybridps/{room}/{name}"), key=lambda path: path.stat().st_mtime)
        if built:
            found[room] = built[-1]
    return found


def test_only_pg_and_bindings_reference_symbols_of_torch():
    libraries = static_libraries()
    if not libraries:
        pytest.skip("no static library under build/: nothing was compiled in this checkout")
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    torch_names = re.compile(r"\b(c10d?|at|torch|pybind11)::")
    wrong = []
    for room, library in libraries.items():
        if room in ("pg", "bindings"):
            continue
        undefined = subprocess.run(["nm", "-C", "-u", library], capture_output=True, text=True, check=True).stdout
        named = [line.strip() for line in undefined.splitlines() if torch_names.search(line)]
        wrong += [f"{library.relative_to(ROOT)}: {line}" for line in named[:3]]
    assert not wrong


def python_imports() -> dict[str, set[str]]:
    """What each module of python/hybridps imports of the others, in functions too. Without hybridps itself, which hands
    on names."""
    files = {path.relative_to(ROOT / "python").with_suffix(""): path for path in (ROOT / "python").rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}
    found = {}
    for module, path in modules.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                package = ".".join(module.split(".")[: -node.level]) if node.level else node.module
                names |= {package} | {f"{package}.{alias.name}" for alias in node.names}
        found[module] = names & set(modules) - {module, "hybridps"}
    del found["hybridps"]
    return found


def test_the_packages_of_python_import_each_other_one_way():
    used = {package: set() for package in PACKAGES}
    for module, imports in python_imports().items():
        package = module.split(".")[1]
        if package in PACKAGES:
            used[package] |= {name.split(".")[1] for name in imports} - {package}
    assert used == PACKAGES


def test_no_modules_of_python_import_each_other_in_a_circle():
    try:
        graphlib.TopologicalSorter(python_imports()).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
