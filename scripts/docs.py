"""Puts the site's pages together in build/docs: docs/, README.md as the home page, and the API from the code's own docstrings.

Links to files of the checkout that are no pages become plain text with the file's path: the site stands alone.
"""

import ast
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "docs"


def relinked(text: str, source: Path) -> str:
    """Links of a page as the site has them."""

    def link(match: re.Match) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        place = (source.parent / target).resolve()
        if place == ROOT / "README.md":
            return f"[{label}](index.md{anchor})"
        decision = place.is_relative_to(ROOT / "docs" / "decisions")  # not in the site
        if place.is_relative_to(ROOT / "docs") and place.is_file() and not decision:
            page = place.relative_to(ROOT / "docs")
            depth = len(source.relative_to(ROOT / "docs").parts) - 1 if source.is_relative_to(ROOT / "docs") else 0
            return f"[{label}]({'../' * depth}{page}{anchor})"
        path = place.relative_to(ROOT)
        return label if str(path) in label else f"{label} ({path})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)", link, text)


def api() -> str:
    """The public names of the package, from its source: nothing is imported."""
    lines = ["# API", "", "Made from the docstrings of `import hybridps`. Settings of a process are in [settings](settings.md).", ""]
    training = [f"training/{name}" for name in ("priority", "compress", "direct", "cross_barrier", "local_steps")]
    for path in ("__init__", *training, "backend/torchft"):
        tree = ast.parse((ROOT / "python" / "hybridps" / f"{path}.py").read_text())
        name = path.split("/")[-1]
        module = "hybridps" if name == "__init__" else f"hybridps.{name}"
        if name != "priority":
            lines += [f"## {module}", "", "```text", ast.get_docstring(tree) or "", "```", ""]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and ast.get_docstring(node):
                signature = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                lines += [f"### {node.name}", "", "```text", f"{node.name}{signature}", "", ast.get_docstring(node), "```", ""]
    return "\n".join(lines)


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=lambda folder, names: [n for n in names if n == "decisions"])
    for page in PAGES.rglob("*.md"):
        source = ROOT / "docs" / page.relative_to(PAGES)
        page.write_text(relinked(page.read_text(), source))
    home = relinked((ROOT / "README.md").read_text(), ROOT / "README.md").replace("](docs/images/", "](images/")
    (PAGES / "index.md").write_text(home)
    (PAGES / "api.md").write_text(api())


if __name__ == "__main__":
    main()
