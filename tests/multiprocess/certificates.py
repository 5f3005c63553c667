"""An authority, and certificates of hosts, for tests of TLS. Needs the command openssl."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest

NAMES = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"


class Authority:
    """Keeps its files in `folder`, which the test removes."""

    def __init__(self, folder: Path, name: str = "authority"):
        if shutil.which("openssl") is None:
            pytest.skip("no command openssl here")
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        self._config = folder / f"{name}.cnf"  # not the system's
        self._config.write_text("[req]\ndistinguished_name=dn\nx509_extensions=of\n[dn]\n[of]\nbasicConstraints=critical,CA:TRUE\n")
        own = ["-x509", "-config", self._config, "-days", "2", "-subj", f"/CN={name}"]
        self._openssl("req", *own, *self._new_key(self._key), "-out", self.file)

    def issue(self, name: str, hosts: str = "", days: int = 2) -> dict[str, str]:
        """The environment of a process on a host with this certificate. `hosts`: as "DNS:a,IP:10.0.0.1". `days`: 0 is a
        certificate that has expired."""
        key, request, certificate = (self.folder / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text("basicConstraints=CA:FALSE\n" + (f"subjectAltName={hosts}\n" if hosts else ""))
        self._openssl("req", "-config", self._config, "-subj", f"/CN={name}", *self._new_key(key), "-out", request)
        signed = ["-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions, "-days", days]
        self._openssl("x509", "-req", "-in", request, *signed, "-out", certificate)
        if days == 0:
            time.sleep(2)
        return {
            "HYBRIDPS_SECURITY": "tls",
            f"{NAMES}PKEY": str(key),
            f"{NAMES}CERT": str(certificate),
            f"{NAMES}CA_FILE": str(self.file),
        }

    @staticmethod
    def _new_key(path: Path) -> list:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path]

    @staticmethod
    def _openssl(*arguments) -> None:
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
