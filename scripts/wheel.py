"""The last steps of scripts/wheel: the version and requirement that name the torch, the tag of the oldest system that will do.

The tag is auditwheel's, from the versions of the symbols that the files use. torch and UCX come from packages of their own
and are neither looked at nor copied in.
"""

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Libraries of other packages, loaded before ours is.
ELSEWHERE = ["libtorch*.so", "libc10*.so", "libucp.so.0", "libucs.so.0"]


def rewritten(wheel: Path, out: Path, version: str, torch: str, tags: list[str]) -> Path:
    """A copy of a wheel under another version, for one torch, with these platforms; what is unchanged is copied."""
    name, old, python, abi, _ = wheel.stem.split("-")
    python_tags = f"{python}-{abi}"
    target = out / f"{name}-{version}-{python_tags}-{'.'.join(tags)}.whl"
    before, after = f"{name}-{old}.dist-info", f"{name}-{version}.dist-info"
    rows = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as made:
        for item in source.infolist():
            data = source.read(item)
            path = after + item.filename[len(before) :] if item.filename.startswith(f"{before}/") else item.filename
            if path == f"{after}/METADATA":
                text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", data.decode(), count=1)
                if torch:
                    text = re.sub(r"(?m)^Requires-Dist: torch.*$", f"Requires-Dist: torch=={torch}.*", text, count=1)
                    assert f"torch=={torch}.*" in text
                data = text.encode()
            elif path == f"{after}/WHEEL":
                text = re.sub(r"(?m)^Tag: .*\n", "", data.decode()).rstrip("\n")
                data = (text + "".join(f"\nTag: {python_tags}-{tag}" for tag in tags) + "\n").encode()
            elif path == f"{after}/RECORD":
                continue
            entry = zipfile.ZipInfo(path, item.date_time)
            entry.external_attr, entry.compress_type = item.external_attr, zipfile.ZIP_DEFLATED
            made.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append([path, f"sha256={digest}", len(data)])
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, [f"{after}/RECORD", "", ""]])
        made.writestr(f"{after}/RECORD", text.getvalue())
    return target


def audited(wheel: Path, tools: Path) -> list[str]:
    """The platforms that auditwheel finds; an error where it would have to copy a library in."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(tools / "auditwheel"), "repair", "--plat", "auto", "-w", folder]
        for library in ELSEWHERE:
            command += ["--exclude", library]
        environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run([*command, str(wheel)], env=environment, capture_output=True, text=True)
        found = list(Path(folder).glob("*.whl"))
        if done.returncode or len(found) != 1:
            sys.exit(f"[wheel] error: auditwheel: {(done.stderr or done.stdout).strip()[-2000:]}")
        with zipfile.ZipFile(found[0]) as made:
            copied = [name for name in made.namelist() if ".libs/" in name]
        if copied:
            sys.exit(f"[wheel] error: it would carry libraries of this system: {', '.join(copied)}")
        return found[0].stem.split("-")[-1].split(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--tools", type=Path, required=True, help="folder of auditwheel and patchelf")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--platform", help="platform of a cross-built wheel, whose own tag is the builder's")
    arguments = parser.parse_args()
    version, torch = arguments.wheel.stem.split("-")[1], ""
    if arguments.name == "hybridps":
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(arguments.wheel) as wheel:
            info = runpy.run_path(wheel.extract("hybridps/_build_info.py", folder))
        torch = info["TORCH_MINOR"]
        version += f"+torch{torch}" + ("" if info["CUDA"] else ".cpu")
    with tempfile.TemporaryDirectory() as folder:
        platforms = [arguments.platform] if arguments.platform else [arguments.wheel.stem.split("-")[-1]]
        named = rewritten(arguments.wheel, Path(folder), version, torch, platforms)
        made = rewritten(named, arguments.out, version, torch, audited(named, arguments.tools))
    print(f"[wheel] {made} ({made.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
