"""PyTorch's test/distributed/test_c10d_fault_tolerance.py with hybridps in its table, from the checkout that PYTORCH_TESTS names.

Its ranks are processes that import this module by its name, so it must be on their path: run it as
    PYTORCH_TESTS=CHECKOUT python -m pytest tests/multiprocess/conformance/torch_fault_tolerance.py
"""

import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

PLACE = os.path.join("test", "distributed", "test_c10d_fault_tolerance.py")


def _load():
    spec = importlib.util.spec_from_file_location(
        "pytorch_fault_tolerance", os.path.join(os.environ["PYTORCH_TESTS"], PLACE)
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HybridpsFaultToleranceTest = _load()._make_fault_tolerance_test_class("hybridps", "cpu")
HybridpsFaultToleranceTest.__module__ = __name__
