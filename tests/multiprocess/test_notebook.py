"""hybridps in a notebook: in the kernel itself, and in processes that a cell forks."""

import harness
import pytest

pytestmark = [pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="of hybridps alone"), pytest.mark.timeout_s(180)]

CELLS = [
    """
import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp

def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])

def rank(index, world, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(index), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(world), "HYBRIDPS_INTERFACE": "lo"}
    dist.init_process_group("hybridps")
    tensor = torch.full((1000,), index + 1.0)
    dist.all_reduce(tensor)
    assert float(tensor[0]) == world * (world + 1) / 2
    dist.destroy_process_group()

mp.start_processes(rank, args=(2, free()), nprocs=2, start_method="fork")
print("two ranks")
""",
    'rank(0, 1, free())\nprint("alone")',
    """
try:
    mp.start_processes(rank, args=(2, free()), nprocs=2, start_method="fork")
except Exception as error:
    print(error)
""",
    'rank(0, 1, free())\nprint("again")',
]


def test_cells_train_and_a_fork_after_use_is_refused_with_what_to_do(tmp_path):
    reason = "is not installed (scripts/extras installs it)"
    nbclient = pytest.importorskip("nbclient", reason=f"nbclient {reason}")
    pytest.importorskip("ipykernel", reason=f"ipykernel {reason}")
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=int(120 * harness.TIME_SCALE), kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = ["".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in notebook.cells]
    assert printed[0] == "two ranks\n" and printed[1] == "alone\n" and printed[3] == "again\n", printed
    assert 'start the child with the "spawn" or "forkserver" method' in printed[2], printed
