"""The kernels that tested notebooks run in: forks, yet as any other kernel to whoever starts, interrupts or kills them."""

import contextlib
import os
import sys
import time

import psutil
import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="about forks on Linux")


@contextlib.contextmanager
def started(folder, **env):
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env=os.environ | env)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def answers(client, code):
    """What a cell prints, and the kinds of what it displays."""
    said, kinds = [], []

    def hook(message):
        content = message["content"]
        if message["msg_type"] == "stream":
            said.append(content["text"])
        kinds.extend(content.get("data", ()))

    reply = client.execute_interactive(code, output_hook=hook, timeout=60)
    return "".join(said).split(), kinds, reply["content"]["status"]


def ended(pid):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_kernel_is_a_fork_with_its_own_folder_environment_and_figures(tmp_path):
    with started(tmp_path, PURPOSE="test") as (_, client):
        code = "import os, sys; print(os.getcwd(), os.environ['PURPOSE'], os.getppid(), 'torch' in sys.modules, sum(p.endswith('helpers') for p in sys.path))"
        (folder, purpose, server, warm, tests), _, _ = answers(client, code)
        assert (folder, purpose, warm, tests) == (str(tmp_path), "test", "True", "0")
        assert "warm_kernels.py" in " ".join(psutil.Process(int(server)).cmdline())
        _, kinds, status = answers(client, "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
        assert status == "ok" and "image/png" in kinds
        assert answers(client, "raise ValueError")[2] == "error"


def test_it_is_interrupted_and_ends_with_its_process(tmp_path):
    with started(tmp_path) as (manager, client):
        pid = int(answers(client, "import os; print(os.getpid())")[0][0])
        message = client.execute("import time\nfor _ in range(600): time.sleep(0.1)")
        time.sleep(0.5)
        manager.interrupt_kernel()
        assert client.get_shell_msg(timeout=30)["parent_header"]["msg_id"] == message
        assert manager.is_alive() and psutil.pid_exists(pid)
    assert ended(pid)


def test_a_killed_kernel_is_seen_to_be_dead(tmp_path):
    with started(tmp_path) as (manager, client):
        pid = int(answers(client, "import os; print(os.getpid())")[0][0])
        os.kill(pid, 9)
        deadline = time.monotonic() + 20
        while manager.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not manager.is_alive() and ended(pid)
