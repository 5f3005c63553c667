"""Random programs (programs/README.md): a few fixed ones, so that the generator does not rot, and new ones for minutes.

HYBRIDPS_TEST_PROGRAM_MINUTES   how long the slow test goes on with new seeds (default 5)
HYBRIDPS_TEST_PROGRAM_FIRST     its first seed (default: a number of its own each day, which the test prints)
"""

import os
import time

import harness
import pytest
from programs import runner
from programs.generator import generate
from programs.steps import KINDS, Limits

MINUTES = float(os.environ.get("HYBRIDPS_TEST_PROGRAM_MINUTES", "5"))
FIRST = int(os.environ.get("HYBRIDPS_TEST_PROGRAM_FIRST", int(time.time() / 86400) * 1000))
DIALECT = "gloo" if harness.IS_GLOO else "hybridps"
LONGEST_S = 400  # that one program may take, beyond the minutes


@pytest.fixture(scope="module")
def servers():
    kept = runner.Servers()
    yield kept
    for words in kept.stop():
        assert "refused" not in words, words


def test_a_program_depends_on_nothing_but_its_seed():
    for seed in range(20):
        first = generate(seed, Limits(dialect=DIALECT))
        assert first == generate(seed, Limits(dialect=DIALECT))
        assert first != generate(seed + 1, Limits(dialect=DIALECT))


def test_leaving_steps_out_leaves_the_others_as_they_are():
    for seed in range(20):
        whole = generate(seed)
        part = generate(seed, Limits(without=("timeout", "functional", "strided"), nodes=whole.nodes))
        assert set(part.steps) < set(whole.steps)
        assert not any(step.late or step.layout == "strided" for step in part.steps)


def test_every_kind_is_drawn():
    drawn = {step.kind for seed in range(80) for step in generate(seed).steps}
    assert drawn == set(KINDS)


# Short ones: a node map, a number of steps.
FIXED = [(1, "2+1", 25), (2, "1+1", 40), (3, "2+2", 30)]


@pytest.mark.parametrize(("seed", "nodes", "steps"), FIXED)
def test_fixed_programs(seed, nodes, steps, servers):
    limits = Limits(nodes=nodes, steps=steps, without=("functional", "brief"), dialect=DIALECT)
    runner.run_program(seed, limits, servers)


@pytest.mark.slow
@pytest.mark.timeout_s(60 * MINUTES + LONGEST_S)
def test_new_programs(servers):
    print(f"from seed {FIRST} on")
    until = time.monotonic() + 60 * MINUTES
    passed, failed = runner.run_many(range(FIRST, FIRST + 10**6), Limits(dialect=DIALECT), servers, until)
    print(f"{len(passed)} passed, {len(failed)} failed")
    assert passed and not failed, f"seeds that failed: {failed}"
