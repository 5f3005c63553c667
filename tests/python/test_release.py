"""scripts/release: what it chooses, writes and refuses. tests/multiprocess/test_wheels.py builds with it."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest
from repo import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import release  # noqa: E402


def test_the_matrix_has_every_pair_newest_torch_first_and_names_what_is_not_here():
    rows = release.matrix(["2.15", "2.13"], {"3.13": "/a", "3.11": "/b"}, all_pythons=False)
    assert [(row.torch, row.python) for row in rows] == [
        ("2.15", "3.13"),
        ("2.15", "3.11"),
        ("2.13", "3.13"),
        ("2.13", "3.11"),
    ]
    absent = release.matrix(["2.15"], {"3.11": "/b"}, all_pythons=True)[1:]
    assert {row.python for row in absent} == set(release.PYTHONS) - {"3.11"}
    assert all(row.built == "-" and f"python{row.python}" in row.why and not row.failed() for row in absent)


def test_the_torches_are_those_that_the_package_takes():
    lower, upper = release.TORCHES[-1], release.TORCHES[0]
    above = f"2.{int(upper.split('.')[1]) + 1}"
    assert f'"torch>={lower},<{above}"' in (ROOT / "pyproject.toml").read_text()
    assert release.minors("2.11, 2.15") == ["2.15", "2.11"]
    for wrong in ("2.10", "", "2.15;2.14"):
        with pytest.raises(ValueError, match="choose from 2.11"):
            release.minors(wrong)


def test_what_went_wrong_counts_and_what_was_not_done_does_not():
    assert not release.Row("wheel", built="yes", installed="yes", tried="yes").failed()
    assert not release.Row("wheel", built="yes", why="not tried: --no-try").failed()
    for one in ("built", "installed", "tried"):
        assert release.Row("wheel", **{one: "no"}).failed()
    text = release.table([release.Row("wheel", "3.11", "2.15", "a.whl", "yes", "yes", "no", "why")])
    assert text.splitlines()[-1] == "| wheel | 3.11 | 2.15 | a.whl | yes | yes | no | why |"
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_checksums_are_those_that_sha256sum_takes(tmp_path):
    (tmp_path / "b.whl").write_bytes(b"two")
    (tmp_path / "a.whl").write_bytes(b"one" * 1_000_000)
    (tmp_path / "SHA256SUMS").write_text("old")
    (tmp_path / "SHA256SUMS").write_text(text := release.checksums(tmp_path))
    assert [line.split("  ")[1] for line in text.splitlines()] == ["a.whl", "b.whl"]
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.parametrize("word", ["1", "0.2", "v0.2.0", "0.2.0-1", "0.2.0+cpu"])
def test_a_version_that_no_package_may_have_is_refused(word, capsys):
    with pytest.raises(SystemExit):
        release.parsed(["--version", word])
    assert f"--version {word}: X.Y.Z" in capsys.readouterr().err
    for right in ("0.2.0", "0.2.0rc1", "0.3.0.dev0"):
        assert release.parsed(["--version", right]).version == right


def test_an_interpreter_that_cannot_build_is_named():
    for wrong in ("/nonexistent/python", "/bin/true"):
        with pytest.raises(release.Failed, match=wrong):
            release.probe(wrong)


def a_wheel(folder, name="hybridps", version="0.2.0+torch2.15"):
    wheel = folder / f"{name}-{version}-cp311-cp311-manylinux_2_31_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        # A real ELF file, so that readelf has something to say, with what libcrypto.a leaves in a program.
        with open(sys.executable, "rb") as file:
            archive.writestr(f"{name}/_C.so", file.read() + b"\0OpenSSL 3.0.17 1 Jul 2025\0")
        text = f"Name: {name}\nVersion: {version}\nRequires-Dist: torch==2.15.*\nRequires-Dist: libucx-cu13>=1.22\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", text)
    return wheel


def test_the_bill_of_materials_says_what_is_inside_and_what_is_required(tmp_path):
    wheel, archive = a_wheel(tmp_path), tmp_path / "libcrypto.a"
    archive.write_bytes(b"objects")
    packages = {"torch": ("2.15.0+cu132", "BSD-3-Clause"), "libucx-cu13": ("1.22.0", "BSD-3-Clause")}
    part = release.wheel_part(wheel, {"openssl-crypto": archive}, packages, tmp_path / "unpacked")
    other = release.part(archive, "file", "hybridps", "0.2.0", [], [])
    document = json.loads(json.dumps(release.bill("0.2.0", [part, other], "2026-01-01T00:00:00Z")))
    assert document["bomFormat"] == "CycloneDX" and document["metadata"]["component"]["version"] == "0.2.0"
    by_ref = {one["bom-ref"]: one for one in document["components"]}
    assert len(by_ref) == len(document["components"])
    ours = by_ref[wheel.name]
    assert ours["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert ours["licenses"] == [{"license": {"id": "Apache-2.0"}}] and ours["version"] == "0.2.0+torch2.15"
    (openssl,) = ours["components"]
    assert openssl["name"] == "openssl" and openssl["version"] == "3.0.17"
    assert openssl["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert openssl["hashes"][0]["content"] == hashlib.sha256(b"objects").hexdigest()
    (required,) = [one["dependsOn"] for one in document["dependencies"] if one["ref"] == wheel.name]
    needs = {by_ref[ref]["name"]: by_ref[ref] for ref in required}
    assert needs["torch"]["version"] == "2.15.0+cu132"
    assert needs["torch"]["properties"][0]["value"] == "torch==2.15.*"
    assert needs["libc.so.6"]["licenses"] == [{"license": {"id": "LGPL-2.1-or-later"}}]
    refs = {"hybridps", *by_ref}
    assert all({one["ref"], *one["dependsOn"]} <= refs for one in document["dependencies"])


def test_without_openssl_none_is_claimed(tmp_path):
    assert release.openssl_of(b"OpenSSL is not here") == ""
    assert release.licences("") == []
    assert release.licences(release.LIBSTDCXX) == [{"expression": release.LIBSTDCXX}]
    assert release.licences("the licence of somebody") == [{"license": {"name": "the licence of somebody"}}]


@pytest.fixture
def checkout(tmp_path):
    """A repository with scripts/release and what it reads first."""
    for name in ("scripts/release", "scripts/release.py", "pyproject.toml", "requirements-dev.txt"):
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes((ROOT / name).read_bytes())
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def refused(checkout, *words):
    done = subprocess.run(["bash", "scripts/release", *words], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_a_tree_with_changes_is_refused_and_a_folder_with_files(checkout):
    (checkout / "new").write_text("")
    assert "1 files are not committed, new for one: commit them, or say --dirty" in refused(checkout, "--out", "out")
    (checkout / "new").unlink()
    (checkout / ".gitignore").write_text("out/\n.gitignore\n")
    (checkout / "out").mkdir()
    (checkout / "out" / "old.whl").write_text("")
    said = refused(checkout, "--out", "out", "--python", sys.executable)
    assert "out holds files" in said, said
    assert "choose from 2.11" in refused(checkout, "--torch", "2.10")
    assert "choose from wheels" in refused(checkout, "--only", "whels")
