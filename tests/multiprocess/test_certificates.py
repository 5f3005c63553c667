"""TLS by the user's certificates: everything works, and what peers would refuse is named on all ranks."""

import socket
from pathlib import Path

import harness
import pytest
from certificates import NAMES, Authority
from harness import run_ranks
from test_dedicated import TOKEN, reductions, servers, settings
from test_first_hour import lines_of
from test_regions import collectives
from test_security import is_refused

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="hybridps's own setting")

HERE = "IP:127.0.0.1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("more", [{}, {"HYBRIDPS_TOKEN": TOKEN}], ids=["alone", "with a token"])
def test_collectives(authority, more):
    of_host = authority.issue("host", HERE)
    of_other = authority.issue("other", "")
    env = {"HYBRIDPS_LOG_LEVEL": "info"} | of_host | more
    results = run_ranks(collectives, "2+1+1", env=env, rank_env={3: of_other})
    said = [text for rank, text in lines_of(results.reports, "info") if text.startswith("hybridps ")]
    assert len(said) == 1 and "data by TCP with TLS by certificates through lo" in said[0], said
    assert not lines_of(results.reports, "warn")


def test_dedicated_servers_need_no_token(authority):
    env = authority.issue("server", HERE)
    with servers(2, env=env | {"HYBRIDPS_TOKEN": ""}) as running:
        run_ranks(reductions, "1+1+1", env=settings(running) | env | {"HYBRIDPS_TOKEN": ""})


def test_a_server_of_another_host_is_refused(authority):
    of_server = authority.issue("elsewhere", "DNS:elsewhere.example")
    env = authority.issue("host", HERE)
    with servers(1, env=of_server) as running:
        run_ranks(
            is_refused,
            "1+1+1",
            args=("has the certificate of another host than 127.0.0.1",),
            env=settings(running, HYBRIDPS_SERVERS_REQUIRED="1") | env,
            init=False,
            destroy=False,
        )


def test_a_server_with_certificates_refuses_a_job_with_the_same_token_alone(authority):
    with servers(1, env=authority.issue("server", HERE)) as running:
        run_ranks(
            is_refused,
            "1+1+1",
            args=("has it no certificates of its own",),
            env=settings(running, HYBRIDPS_SERVERS_REQUIRED="1", HYBRIDPS_SECURITY="tls"),
            init=False,
            destroy=False,
        )
        said = running[0].stop()
        assert "another token, or none, or other certificates" in said, said


@pytest.mark.parametrize(
    ("of_server", "of_job", "told"),
    [
        (TOKEN, "", "has a token, and this job has only certificates"),
        ("", TOKEN, "has another token, or only certificates"),
    ],
)
def test_certificates_with_a_token_and_without_do_not_meet(authority, of_server, of_job, told):
    env = authority.issue("both", HERE)
    with servers(1, env=env | {"HYBRIDPS_TOKEN": of_server}) as running:
        job = settings(running, HYBRIDPS_SERVERS_REQUIRED="1") | env | {"HYBRIDPS_TOKEN": of_job}
        run_ranks(is_refused, "1+1+1", args=(told,), env=job, init=False, destroy=False)


def test_a_key_that_others_may_read_is_a_warning(authority):
    env = authority.issue("open", HERE)
    Path(env[f"{NAMES}PKEY"]).chmod(0o644)
    results = run_ranks(reductions, "1+1", env=env)
    said = lines_of(results.reports, "warn")
    assert len(said) == 1 and "all users of this host may read" in said[0][1] and "open.key" in said[0][1], said
    with servers(1, token="", env=env) as running:
        assert "all users of this host may read" in running[0].stop()


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("expired", "certificate has expired"),
        ("of another host", "is of another host"),
        ("of another authority", "the certificate of the other side is refused|refuses the certificate of this host"),
        ("no key", "needs GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY"),
        ("a token only", "HYBRIDPS_SECURITY=tls"),
        ("a token beside it", "HYBRIDPS_SECURITY=tls"),
        ("in clear", "HYBRIDPS_SECURITY=tls"),
    ],
)
def test_all_or_none(authority, tmp_path, what, told, odd):
    env = authority.issue("host", HERE)
    unset = {name: "" for name in env if name.startswith(NAMES)}
    its = {
        "expired": lambda: authority.issue("old", HERE, days=0),
        "of another host": lambda: authority.issue("elsewhere", f"DNS:not-{socket.gethostname()}.example,IP:10.9.9.9"),
        "of another authority": lambda: Authority(tmp_path, "another").issue("host", HERE),
        "no key": lambda: {f"{NAMES}PKEY": ""},
        "a token beside it": lambda: {"HYBRIDPS_TOKEN": TOKEN},
        "a token only": lambda: unset | {"HYBRIDPS_TOKEN": TOKEN},
        "in clear": lambda: {"HYBRIDPS_SECURITY": "off"},
    }[what]()
    run_ranks(is_refused, "1+1+1", args=(told,), env=env, rank_env={odd: its}, init=False, destroy=False)
