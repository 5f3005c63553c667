"""Runs unit programs on an emulated machine whose kernel encrypts TLS (csrc/hybridps/tls/kernel_sender.h).

    python tests/rdma/kernel_tls.py --kernel DIR build/release/tests/unit_tls build/release/tests/unit_transport_tcp

DIR has a kernel of Linux 6.14 or newer with its modules, as Debian's packages hold them:

    apt-get download linux-binary-unsigned-VERSION-cloud-amd64 linux-modules-VERSION-cloud-amd64
    for package in linux-*.deb; do dpkg-deb -x $package DIR; done

Needs qemu-system-x86_64, busybox-static and kmod. Four minutes for unit_tls, a quarter of an hour for the other:
tests that wait for something real may fail there, because the machine is slow (--no-tls: the same without the module).
"""

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from machine import write_cpio

MODULES = ["gcm", "ctr", "aesni_intel", "tls"]  # Linux has no other AES-GCM without them

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp
for module in MODULES; do insmod /modules/$module; done
ip link set lo up
echo "Linux $(uname -r), upper layer protocols: $(cat /proc/sys/net/ipv4/tcp_available_ulp)"
export HOME=/tmp
for program in PROGRAMS; do echo "== $program"; /bin/$program "~[.long]" 2>/dev/null; echo "exit status $?"; done
poweroff -f
"""


def libraries_of(path: Path) -> list[Path]:
    """Also libssl's, which hybridps loads later."""
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in re.findall(r"(/\S+)", told)]


def libssl() -> Path:
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return Path(re.search(r"libssl\.so\.3 .*=> (\S+)", told)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", type=Path, required=True, metavar="DIR")
    parser.add_argument("--no-tls", action="store_true", help="without the module: OpenSSL encrypts")
    parser.add_argument("--limit-s", type=float, default=3600, help="for all programs together")
    parser.add_argument("programs", nargs="+", type=Path)
    options = parser.parse_args()
    images = sorted(options.kernel.rglob("vmlinuz*"))
    folders = sorted(options.kernel.rglob("lib/modules/*/kernel"))
    lacks = [tool for tool in ("qemu-system-x86_64", "busybox", "depmod", "modprobe") if not shutil.which(tool)]
    if lacks or not images or not folders:
        print(f"kernel_tls: {', '.join(lacks) or f'no vmlinuz and modules under {options.kernel}'} missing")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "root"
        for name in ("bin", "proc", "sys", "dev", "tmp", "modules"):
            (tree / name).mkdir(parents=True)
        version, prefix = folders[0].parent.name, folders[0].parents[3]
        subprocess.run(["depmod", "-b", prefix, version], check=True)
        order = []
        for module in [] if options.no_tls else MODULES:
            command = ["modprobe", "-d", prefix, "-S", version, "--show-depends", module]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for path in map(Path, re.findall(r"^insmod (\S+)", told, re.MULTILINE)):
                if (name := path.name.removesuffix(".xz")) not in order:
                    order.append(name)
                    packed = path.read_bytes()
                    (tree / "modules" / name).write_bytes(lzma.decompress(packed) if path.suffix == ".xz" else packed)
        shutil.copy(shutil.which("busybox"), tree / "bin/busybox")
        for program in options.programs:
            shutil.copy(program, tree / "bin" / program.name)
        for path in {one for program in [*options.programs, libssl()] for one in libraries_of(program)} | {libssl()}:
            (tree / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tree / path.relative_to("/"))
        names = " ".join(program.name for program in options.programs)
        (tree / "init").write_text(INIT.replace("MODULES", " ".join(order)).replace("PROGRAMS", names))
        (tree / "init").chmod(0o755)
        archive = Path(folder) / "initrd"
        write_cpio(tree, archive)
        machine = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-smp", "2", "-cpu", "max", "-m", "2500"]
        machine += ["-nographic", "-no-reboot", "-kernel", images[0], "-initrd", archive]
        machine += ["-append", "console=ttyS0 quiet panic=-1"]
        with subprocess.Popen(machine, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as running:
            limit = threading.Timer(options.limit_s, running.kill)
            limit.daemon = True
            limit.start()
            said = []
            try:
                for line in running.stdout:
                    said.append(line)
                    print(line, end="", flush=True)
                if not limit.is_alive():
                    print(f"kernel_tls: the machine has not ended within {options.limit_s:g} s")
            finally:
                limit.cancel()
                running.kill()
    results = re.findall(r"^exit status (\d+)", "".join(said), re.MULTILINE)
    return 0 if len(results) == len(options.programs) and set(results) == {"0"} else 1


if __name__ == "__main__":
    sys.exit(main())
