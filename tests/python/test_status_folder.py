"""Whom `hybridps status` asks, and what it shows of answers: sockets of this test instead of processes with groups."""

import json
import os
import socket
import threading

import pytest

from hybridps.tools import status


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "see"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HYBRIDPS_STATUS", str(folder))
    return folder


@pytest.fixture
def answering(place):
    """Starts a socket that gives everybody the same answer."""
    opened = []

    def start(answer, listen=socket.socket.listen):
        door = socket.socket(socket.AF_UNIX)
        opened.append(door)
        door.bind(str(place / f"1{len(opened)}.0.sock"))
        listen(door)

        def serve():
            while True:
                try:
                    visitor, _ = door.accept()
                except OSError:
                    return
                with visitor:
                    if visitor.recv(100):
                        visitor.sendall(json.dumps(answer).encode())

        threading.Thread(target=serve, daemon=True).start()

    yield start
    for door in opened:
        door.shutdown(socket.SHUT_RDWR)
        door.close()


def own(host):
    group = {"name": "0", "world": True, "rank": 0, "size": 1, "state": "ready", "uid": "u", "members": [], "pending_count": 0}
    net = {"tx_bytes_per_second": 0, "rx_bytes_per_second": 0}
    return {
        "engine": "e", "role": "rank", "host": host, "pid": 1, "job": "j", "groups": [group], "peers": [], "net": net,
        "memory": {"pool_slots_in_use": 0}, "limit_bytes_per_second": 0, "compress": "",
    }  # fmt: skip


def test_what_answers_hold_cannot_command_the_terminal(answering, capsys):
    answering({"own": json.dumps(own("\x1b]0;box\x07\nranks: fine\x9b2J \u202e"))})
    answering({"stuck": "\x1b[2Jnothing\rto see"})
    assert status.show(False, None) == 0
    shown = capsys.readouterr().out
    assert r"\x1b]0;box\x07\nranks: fine\x9b2J \u202e" in shown and r"\x1b[2Jnothing\rto see" in shown, shown
    assert all(line.isprintable() for line in shown.split("\n")), shown


def test_a_folder_that_others_may_enter_is_not_believed(place, answering, capsys):
    answering({"own": json.dumps(own("box"))})
    assert len(status.collect()[0]) == 1
    place.chmod(0o711)
    assert status.collect() == ([], [])
    assert status.show(False, None) == 2 and status.trace(None) == 2
    assert capsys.readouterr().err.count(f"{place} is not a folder of this user alone") == 2


def test_a_folder_of_another_user_is_not_believed_unless_root_names_it(tmp_path, place, answering, monkeypatch, capsys):
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a folder away")

    def listen_as_nobody(door):
        os.seteuid(65534)  # what the kernel says of a socket is who called listen()
        try:
            door.listen()
        finally:
            os.seteuid(0)

    answering({"own": json.dumps(own("box"))}, listen_as_nobody)
    jobs, (found,) = status.collect()
    assert not jobs and found["problem"] == "it is another user's", found
    os.chown(place, 65534, -1)
    assert len(status.collect()[0]) == 1, "root has named the folder"
    monkeypatch.delenv("HYBRIDPS_STATUS")
    place.rename(tmp_path / "hybridps-0")
    assert status.folder() == tmp_path / "hybridps-0"
    assert status.collect() == ([], [])
    assert status.show(False, None) == 2
    assert "is not a folder of this user alone" in capsys.readouterr().err
