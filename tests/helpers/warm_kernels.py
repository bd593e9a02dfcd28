"""Notebook kernels that are there at once: forks of one process that has imported what notebooks import.

``conftest.py`` names this file as the kernel ``python3``, so whoever starts one (nbval, papermill) runs ``client``: it
asks the server for a fork, stands for it as a process, passes signals on, and ends with it. The first client starts the
server; that ends with the test run. A kernel of its own, as a user has it, is what ``test_kills`` and ``test_jupyterlab``
start. This file must import quickly: only the server imports more.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

IMPORTS = """fedlib_lab.papers.reefl.attention_maps fedlib_lab.report.clients fedlib_lab.executors.processes fedlib.engine.rounds
fedlib_lab.report.plots fedlib_lab.report.tables fedlib_lab.report.verdicts fedlib_lab.runs.store filelock ipykernel.kernelapp
IPython.core.pylabtools ipywidgets matplotlib.pyplot pandas peft seaborn torch tqdm.auto""".split()


def install(folder):
    """Make kernel ``python3`` one of these for all that inherit the environment; ``folder`` goes with the test run."""
    spec = os.path.join(folder, "jupyter", "kernels", "python3")
    os.makedirs(spec)
    own = [sys.executable, "-I", "-S", __file__, "client", os.path.join(folder, "kernels.sock"), str(os.getpid())]
    argv = [*own, "-f", "{connection_file}"]
    with open(os.path.join(spec, "kernel.json"), "w") as f:
        json.dump({"argv": argv, "display_name": "Python 3", "language": "python"}, f)
    os.environ["JUPYTER_PATH"] = os.path.join(folder, "jupyter")


def client(path, tests, *options):
    """Stand for a fork that is a kernel with ``options``: end when it ends, and let it end when this process does."""
    parent, server = os.getppid(), reach(path, tests)
    order = {"options": options, "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
    kernel = int(server.recv(32))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: os.kill(kernel, n))
    while not select.select([server], [], [], 0.5)[0]:  # readable: closed, as the kernel has ended
        if os.getppid() != parent:
            return


def reach(path, tests):
    """A connection to the server at ``path``, which the first who asks starts."""
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = None
        while server is None or server.poll() is None:
            connection = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(path)
                return connection
            if server is None:
                command = [sys.executable, __file__, "serve", path, tests]
                with open(path + ".log", "w") as log:  # a pipe of the client's would stay open as long as the server
                    server = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
            time.sleep(0.05)
    with open(path + ".log") as log:
        raise RuntimeError(f"the server of kernels ended: {log.read()}")


def serve(path, tests):
    """Fork a kernel for each client, until the test run (process ``tests``) is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    sys.path.pop(0)  # this file's folder, which notebooks do not see
    os.environ["MPLBACKEND"] = (
        "module://matplotlib_inline.backend_inline"  # as in every kernel, which imports it itself
    )
    os.environ.pop("JPY_PARENT_PID", None)  # of the client that started this
    for name in IMPORTS:
        __import__(name)
    assert threading.active_count() == 1  # beside those of BLAS and of Arrow's allocator, which see to forks themselves
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended kernels leave nothing behind
    while os.path.exists(path) and os.path.exists(f"/proc/{tests}"):
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        connection, _ = listener.accept()
        order, files, _, _ = socket.recv_fds(connection, 2**20, 3)
        if pid := os.fork():
            connection.send(str(pid).encode())
        else:
            listener.close()
            kernel(connection, json.loads(order), files)
        for f in (*files, connection.detach()):
            os.close(f)


def kernel(connection, order, files):
    """Be the kernel that was asked for, in its folder and with its environment; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for own, given in enumerate(files):
        os.dup2(given, own)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])

    def end_with_the_client():
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_the_client, daemon=True).start()
    from ipykernel.kernelapp import IPKernelApp

    sys.argv = ["ipykernel_launcher", *order["options"]]
    try:
        IPKernelApp.launch_instance(sys.argv[1:])
    finally:
        os._exit(0)


if __name__ == "__main__":
    {"client": client, "serve": serve}[sys.argv[1]](*sys.argv[2:])
