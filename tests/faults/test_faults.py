"""The faults of faults.py as tests: a short selection by default, all of them with -m slow."""

import faults
import harness
import pytest

pytestmark = pytest.mark.skipif(
    not harness.IS_HYBRIDPS, reason="the bars are hybridps's; scripts/faults shows gloo's figures"
)


@pytest.mark.timeout_s(600)
@pytest.mark.parametrize(
    "name",
    [
        name if fault.in_default_tests else pytest.param(name, marks=pytest.mark.slow)
        for name, fault in faults.FAULTS.items()
    ],
)
def test_fault(name):
    row = faults.run(name, "hybridps")
    if row.skipped:
        pytest.skip(row.skipped)
    print(f"{name}: {row.detection}; {row.culprit}; {row.left}; {row.note}")
    assert not row.bad, "\n".join(row.bad)
