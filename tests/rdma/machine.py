"""An emulated machine with Soft-RoCE: a Debian root of its own, a kernel whose rxe works in network namespaces, and a
UCX with verbs from a source tree. Steps that were done for the same inputs are not done again (`stamps/`).

Needs root, debootstrap, qemu-system-x86_64, mke2fs, xz, a Debian mirror.
Nothing outside the machine's folder is touched; mounts live in the namespaces of the commands that need them.
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
SUITE = "sid"  # Debian 13's kernel 6.12 cannot use rxe in a namespace
KERNEL_MIN = (7, 0)
UCX_MIN = (1, 22)  # 1.13 and 1.18 do not get along with rxe
PACKAGES = (
    "autoconf automake busybox-static cmake g++ ibverbs-providers iproute2 kmod libibverbs-dev libssl-dev libtool make "
    "ninja-build pkgconf procps python3 rdma-core util-linux xz-utils"
).split()
TORCH_PACKAGES = ["python3-torch", "libtorch-dev", "pybind11-dev", "python3-dev"]
MODULES = "virtio_pci virtio_blk ext4 9pnet_virtio 9p ib_uverbs rdma_rxe veth sch_netem".split()
BOOT_TRIES = 3  # an emulated kernel sometimes dies while it starts

# The first process of the machine. What it runs lies in /share, and so does the answer.
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module || echo "insmod $module failed"; done
mkdir -p /newroot
for i in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda ] && break; sleep 1; done
mount -t ext4 /dev/vda /newroot || { echo "no root disk"; poweroff -f; }
mount --move /proc /newroot/proc; mount --move /sys /newroot/sys; mount --move /dev /newroot/dev
mkdir -p /newroot/dev/shm /newroot/dev/pts /newroot/share /newroot/src
mount -t tmpfs -o mode=1777 tmpfs /newroot/dev/shm; mount -t tmpfs -o mode=1777 tmpfs /newroot/tmp
mount -t devpts devpts /newroot/dev/pts; mount -t tmpfs -o mode=755 tmpfs /newroot/run
options=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o $options share /newroot/share || { echo "no shared folder"; poweroff -f; }
mount -t 9p -o $options,ro src /newroot/src || { echo "no checkout"; poweroff -f; }
exec switch_root /newroot /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 \\
  PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /bin/bash /share/first.sh
"""
# It is process 1: nothing else may end the machine.
FIRST = """echo started > /share/state
bash /share/command.sh
echo $? > /share/exit-code
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


class Failed(Exception):
    """This machine cannot be made, or did not answer; the text says why."""


def debian_mirror() -> str:
    """The one that this host uses itself; empty when it is no Debian."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        try:
            words = path.read_text().split()
        except OSError:
            continue
        for word in words:
            if re.fullmatch(r"https?://\S+/debian/?", word):
                return word
    return ""


def missing() -> list[str]:
    """What this host lacks, in words; empty when the machine can be made."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append("root")
    for tool, package in {
        "debootstrap": "debootstrap",
        "qemu-system-x86_64": "qemu-system-x86",
        "mke2fs": "e2fsprogs",
        "unshare": "util-linux",
        "xz": "xz-utils",
    }.items():
        if not shutil.which(tool) and not os.path.exists(f"/usr/sbin/{tool}"):
            lacks.append(f"{tool} (Debian package {package})")
    return lacks


def ucx_source_version(source: Path) -> tuple[int, int]:
    """From configure.ac; Failed where this is no UCX."""
    numbers = {}
    try:
        for line in (source / "configure.ac").read_text().splitlines():
            for part in ("major", "minor"):
                if line.startswith(f"define([ucx_ver_{part}],"):
                    numbers[part] = int(line.split(",")[1].split(")")[0])
        return numbers["major"], numbers["minor"]
    except (OSError, KeyError, ValueError) as error:
        raise Failed(f"{source} is not a UCX source tree: {error}") from error


def write_cpio(tree: Path, archive: Path) -> None:
    """A folder as the kernel wants its first file system: cpio's "newc" format, plain files and folders."""
    with archive.open("wb") as out:

        def entry(name: str, mode: int, data: bytes) -> None:
            fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
            head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
            for part in (head, data):
                out.write(part + b"\0" * (-len(part) % 4))

        for path in sorted(tree.rglob("*")):
            folder = path.is_dir()
            entry(str(path.relative_to(tree)), path.stat().st_mode, b"" if folder else path.read_bytes())
        entry("TRAILER!!!", 0, b"")


class Machine:
    def __init__(
        self, folder: Path, ucx: Path, mirror: str, jobs: int, say: Callable[[str], None], torch: bool = False
    ):
        self.torch = torch
        self.packages = PACKAGES + (TORCH_PACKAGES if torch else [])
        self.folder, self.ucx, self.mirror, self.jobs, self.say = folder.resolve(), ucx.resolve(), mirror, jobs, say
        self.root, self.share = self.folder / "root", self.folder / "share"
        self.kernel = ""
        version = ucx_source_version(self.ucx)
        if version < UCX_MIN:
            raise Failed(f"UCX {version[0]}.{version[1]} in {ucx}: over rxe only 1.22 and newer are known to work")
        self.ucx_version = f"{version[0]}.{version[1]}"

    def prepare(self) -> None:
        for folder in (self.folder / "stamps", self.share / "build"):
            folder.mkdir(parents=True, exist_ok=True)
        self._step("root", f"{SUITE} {self.mirror}", self._debootstrap)
        self._step("packages", " ".join(self.packages), self._install)
        self._step("kernel", SUITE, self._install_kernel)
        self.kernel = self._newest_kernel()
        tree = hashlib.sha256(str((str(self.ucx), (self.ucx / "configure.ac").stat().st_mtime_ns)).encode()).hexdigest()
        self._step("ucx", tree, self._build_ucx)
        self._build_project()
        shutil.rmtree(self.share / "build-py/python", ignore_errors=True)
        if self.torch:
            self._build_extension()
        self._step("disk", " ".join(self.packages) + self.kernel + tree, self._make_disk)

    def boot(self, command: str, limit_s: float, memory_mib: int = 4096) -> int:
        """Runs a command line in the machine and gives its exit status. /share is `share` here, /src the checkout."""
        (self.share / "first.sh").write_text(FIRST)
        (self.share / "command.sh").write_text(command + "\n")
        for attempt in range(1, BOOT_TRIES + 1):
            for name in ("exit-code", "state"):
                (self.share / name).unlink(missing_ok=True)
            begin = time.monotonic()
            late = self._qemu(limit_s, memory_mib)
            code = self.share / "exit-code"
            if code.exists() and code.read_text().strip():
                return int(code.read_text())
            log = (self.folder / "console.log").read_text(errors="replace").splitlines()
            if late:
                raise Failed(
                    f"the machine did not finish within {limit_s:.0f} s; its console: {self.folder}/console.log"
                )
            began = (self.share / "state").exists()
            why = next((line for line in log if "Oops" in line or "panic" in line), log[-1] if log else "no output")
            self.say(f"the machine died {'while it ran' if began else 'while it started'}, {why.strip()[:120]}")
            self.say(f"attempt {attempt} of {BOOT_TRIES}, {time.monotonic() - begin:.0f} s")
        raise Failed(f"the machine died {BOOT_TRIES} times: {self.folder}/console.log")

    # Steps

    def _step(self, name: str, key: str, work: Callable[[], None]) -> None:
        stamp = self.folder / "stamps" / name
        if stamp.exists() and stamp.read_text() == key:
            return
        self.say(f"{name} ...")
        begin = time.monotonic()
        stamp.unlink(missing_ok=True)
        work()
        stamp.write_text(key)
        self.say(f"{name}: {time.monotonic() - begin:.0f} s")

    def _run(self, name: str, command: list[str]) -> None:
        log = self.folder / f"{name}.log"
        with log.open("ab") as out:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"{name} failed ({log}):\n{tail}")

    def _in_root(self, name: str, script: str) -> None:
        """Runs a shell script in the root, in namespaces of its own: nothing stays mounted, nothing goes on running."""
        q = shlex.quote
        outside = (
            f"set -e; cd {q(str(self.root))}; mkdir -p src share; mount -t proc proc proc; mount --rbind /dev dev; "
            f"mount --bind -o ro {q(str(CHECKOUT))} src; mount --bind {q(str(self.share))} share; "
            f"exec chroot . /usr/bin/env -i HOME=/root LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "
            f"PATH=/usr/sbin:/usr/bin:/sbin:/bin bash -euc {q(script)}"
        )
        unshare = "unshare --mount --propagation private --pid --fork --kill-child sh -c".split()
        self._run(name, [*unshare, outside])

    def _debootstrap(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self._run("root", ["debootstrap", "--variant=minbase", SUITE, str(self.root), self.mirror])
        policy = self.root / "usr/sbin/policy-rc.d"
        policy.write_text("#!/bin/sh\nexit 101\n")  # no services in the root
        policy.chmod(0o755)
        # A mirror that is a snapshot is older than its expiry date.
        (self.root / "etc/apt/apt.conf.d/90snapshot").write_text('Acquire::Check-Valid-Until "false";\n')

    def _install(self) -> None:
        shutil.copyfile("/etc/resolv.conf", self.root / "etc/resolv.conf")
        self._in_root(
            "packages",
            f"apt-get update && apt-get install -y --no-install-recommends {' '.join(self.packages)} && apt-get clean",
        )

    def _install_kernel(self) -> None:
        """Unpacked, not installed: it needs no boot loader, and its initrd is made here."""
        self._in_root(
            "kernel",
            """
            mkdir -p /var/tmp/kernel; cd /var/tmp/kernel
            image=$(apt-cache depends linux-image-amd64 | grep -o 'linux-image-[0-9].*' | head -n 1)
            version=${image#linux-image-}
            for package in "$image" "linux-base-$version" "linux-binary-$version" "linux-modules-$version"; do
              apt-get download "$package" || [ "$package" != "$image" ]
            done
            for package in *.deb; do dpkg-deb -x "$package" /; done
            rm -rf /var/tmp/kernel
            depmod "$version"
            """,
        )

    def _newest_kernel(self) -> str:
        folders = sorted(path.name for path in (self.root / "usr/lib/modules").iterdir())
        for name in reversed(folders):
            if tuple(int(n) for n in name.split("+")[0].split("-")[0].split(".")[:2]) >= KERNEL_MIN:
                return name
        raise Failed(f"no kernel {KERNEL_MIN[0]}.{KERNEL_MIN[1]} or newer in {SUITE}, only {folders}")

    def _build_ucx(self) -> None:
        source = self.root / "usr/src/ucx"
        if not source.exists():
            shutil.copytree(self.ucx, source, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        # -Werror does not survive a compiler newer than the source. What was compiled stays when this is stopped.
        self._in_root(
            "ucx",
            f"""
            cd /usr/src/ucx
            [ -e configure ] || {{ ./autogen.sh; sed -i 's/-Werror//g' configure; }}
            mkdir -p /usr/src/ucx-build; cd /usr/src/ucx-build
            [ -e Makefile ] || /usr/src/ucx/configure --prefix=/usr/local --with-verbs --enable-mt --disable-debug \\
              --disable-assertions --without-cuda --without-rocm --without-java --without-go --without-rdmacm \\
              --without-knem --without-xpmem --disable-doxygen-doc CFLAGS='-O2 -g0' CXXFLAGS='-O2 -g0'
            for part in src/ucm src/ucs src/uct src/ucp src/tools/info; do
              make -j{self.jobs} -C $part
              make -C $part install
            done
            ldconfig
            ls /usr/local/lib/ucx/libuct_ib.so*
            """,
        )
        for name in ("ucx", "ucx-build"):
            shutil.rmtree(self.root / "usr/src" / name)

    def _build_project(self) -> None:
        self._build("hybridps", "/share/build", "OFF", "rdma_ranks hybridps_server_program")

    def _build_extension(self) -> None:
        after = """
            cd /share/build-py/python/hybridps
            cp -R /share/build-py/generated/python/_build_info.py /src/python/hybridps/. .
            python3 -c "import torch; print(torch.__version__)" > ../torch
            """
        self._build("extension", "/share/build-py", "ON", "_C", after)

    def _build(self, name: str, folder: str, python: str, targets: str, after: str = "") -> None:
        self.say(f"{name} ...")
        begin = time.monotonic()
        self._in_root(
            name,
            f"""
            cmake -S /src -B {folder} -G Ninja -DCMAKE_BUILD_TYPE=Release -DHYBRIDPS_BUILD_TESTS=OFF \\
              -DHYBRIDPS_BUILD_PYTHON={python} -DPython_EXECUTABLE=/usr/bin/python3 -DHYBRIDPS_UCX_ROOT=/usr/local
            cmake --build {folder} -j{self.jobs} --target {targets}
            {after}
            """,
        )
        self.say(f"{name}: {time.monotonic() - begin:.0f} s")

    def _make_disk(self) -> None:
        disk = self.folder / "root.ext4"
        disk.unlink(missing_ok=True)
        self._run("disk", ["mke2fs", "-q", "-t", "ext4", "-d", str(self.root), str(disk), "12G"])  # sparse
        self._make_initrd()

    def _make_initrd(self) -> None:
        tree = self.folder / "initrd"
        shutil.rmtree(tree, ignore_errors=True)
        for name in ("bin", "dev", "proc", "sys", "modules", "newroot"):
            (tree / name).mkdir(parents=True)
        shutil.copy(self.root / "usr/bin/busybox", tree / "bin/busybox")
        (tree / "init").write_text(INIT)
        (tree / "init").chmod(0o755)
        order: list[str] = []
        for module in MODULES:
            shown = subprocess.run(
                ["chroot", str(self.root), "modprobe", "-S", self.kernel, "--show-depends", module],
                capture_output=True,
                text=True,
            )
            if shown.returncode != 0:
                raise Failed(f"kernel {self.kernel} has no module {module}: {shown.stderr.strip()}")
            for line in shown.stdout.splitlines():
                if not line.startswith("insmod "):
                    continue  # built in
                path = self.root / line.split()[1].lstrip("/")
                name = path.name.removesuffix(".xz")
                if name in order:
                    continue
                order.append(name)
                if path.suffix == ".xz":
                    (tree / "modules" / name).write_bytes(
                        subprocess.run(["xz", "-dc", path], capture_output=True).stdout
                    )
                else:
                    shutil.copy(path, tree / "modules" / name)
        (tree / "modules/order").write_text("\n".join(order) + "\n")
        write_cpio(tree, self.folder / "initrd.cpio")

    def _qemu(self, limit_s: float, memory_mib: int) -> bool:
        """True when it had to be stopped."""
        vmlinuz = self.root / "usr/lib/modules" / self.kernel / "vmlinuz"
        if not vmlinuz.exists():
            vmlinuz = self.root / f"boot/vmlinuz-{self.kernel}"
        virtfs = "local,security_model=none,multidevs=remap"
        command = [
            *"qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -nographic -no-reboot".split(),
            *["-m", str(memory_mib), "-nic", "none", "-serial", f"file:{self.folder}/console.log", "-monitor", "none"],
            *["-kernel", str(vmlinuz), "-initrd", str(self.folder / "initrd.cpio")],
            *["-append", "console=ttyS0 panic=-1 quiet loglevel=4"],
            *["-drive", f"file={self.folder}/root.ext4,if=virtio,format=raw,snapshot=on"],
            *["-virtfs", f"{virtfs},path={self.share},mount_tag=share,id=share"],
            *["-virtfs", f"{virtfs},readonly=on,path={CHECKOUT},mount_tag=src,id=src"],
        ]
        with (self.folder / "qemu.log").open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return True
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if process.returncode != 0:
            raise Failed(f"QEMU: {(self.folder / 'qemu.log').read_text(errors='replace').strip()[-500:]}")
        return False
