"""An executor on Flower: a round's cohorts are trained by ClientApps on the SuperNodes of a SuperLink.

This process is the ServerApp of a Flower run. A SuperNode gets the experiment, the members of a cohort and of the
trained parameters the entries that these hold; it builds model and data by itself, and sends weighted sums. Nothing
that travels is unpickled (``messages.py``), so no code does: methods, backbones and data sets of a notebook are
refused. Every SuperNode needs the same fedlib and torch, and the data; ``--node-config 'device="cuda"'`` lets it train
on a GPU. What comes back is checked for its form and weight, not for honesty. Flower starts a process for every cohort.
Read next: ``cluster.py``, the same on Ray.
"""

import builtins
import ctypes
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.slices import ParamInfo, Slice, scatter_add_, take
from fedlib.engine.executors import Execution, Trained
from fedlib.engine.federation import Federation, build_federation
from fedlib.methods import Member, Method, Round, Server
from fedlib.methods.mixtures import under
from fedlib.methods.sums import MaskedMean, Update, all_finite

from ..kernels.products import choose_products
from .messages import deserialise, serialise
from .workers import Finished, Workers, become_worker, move, moved, train_task, versions

KINDS = (Client, Slice, Member, Trained)
APP = b"""[project]
name = "fedlib-cohorts"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedlib"
[tool.flwr.app.components]
serverapp = "node:server"
clientapp = "node:client"
"""
NODE = b"from fedlib_lab.executors.flower import client_app\n\nclient = client_app()\n"
Running = tuple[int, int, float, list[Member]]  # a cohort's place, its node, since when, its members
Served = list[tuple[int, str, torch.Tensor]]  # a member's place, a parameter's local name, the entries it holds


class Link:
    """This process as ServerApp on the SuperLink at ``address``, or on one of its own with ``nodes`` SuperNodes.

    Raises ``ImportError`` without Flower, ``ConnectionError`` if there is no SuperLink for ``patience`` seconds.
    """

    def __init__(self, address: str | None, nodes: int, patience: float):
        try:
            from flwr.common.serde import run_from_proto
            from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
            from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
            from flwr.supercore.runtime import RuntimeHttpClient
            from flwr.superlink.grid import HttpGrid
        except ImportError as error:
            raise ImportError("executor = 'flower' needs Flower; install fedlib with its extra 'flower'") from error
        self.processes: list[subprocess.Popen] = []
        with ExitStack() as opened:
            self.folder = opened.enter_context(TemporaryDirectory(prefix="fedlib-flower-"))
            opened.callback(self._end)
            address = address or self._start(nodes)
            self.insecure = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
            run_id = self._start_run(address, patience)
            asker = self._client(RuntimeHttpClient, address, "SuperExec")
            task = asker.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
            asker.close()
            if not task.token or task.task.run_id != run_id:
                raise ConnectionError(f"the SuperLink at {address} runs ServerApps; start it with --isolation process")
            self.grid: Any = HttpGrid(address, self.insecure, token=task.token)
            opened.callback(self.grid.close)
            opened.callback(self._stop_run, run_id)
            client = self.grid._runtime_client
            self.task = client.PullTaskInput(PullTaskInputRequest())
            self.grid.set_run(run_from_proto(self.task.run))
            heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeat.start()
            opened.callback(heartbeat.stop)
            self.close = opened.pop_all().close

    def _client(self, kind: Any, address: str, who: str) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        how = {"root_certificates": None, "interceptors": [RuntimeVersionHttpInterceptor(component_name=who)]}
        return kind.from_server_address(server_address=address, insecure=self.insecure, **how)

    def _start(self, nodes: int) -> str:
        """Start a SuperLink and its SuperNodes on this machine, which end with this process; return its address."""
        folder, programs = self.folder, Path(sys.executable).parent
        environment = {"FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        environment = {**os.environ, **environment, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"}
        ports = [_free_port() for _ in range(nodes + 1)]
        link = f"127.0.0.1:{ports[0]}"
        commands = [["flower-superlink", "--isolation", "process", "--host", "127.0.0.1", "--port", str(ports[0])]]
        commands += [["flower-supernode", "--superlink", link, "--port", str(p)] for p in ports[1:]]
        with open(Path(folder, "log"), "wb") as log:
            for program, *arguments in commands:
                command = [programs / program, "--insecure", *arguments]
                told: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "preexec_fn": _end_with_parent}
                self.processes.append(subprocess.Popen(command, env=environment, cwd=folder, **told))
        return link

    def _start_run(self, address: str, patience: float) -> int:
        """Start a run of the app whose ClientApp is :func:`client_app`; return its id."""
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.fab import Fab

        data, _ = build_fab_from_files({"pyproject.toml": APP, "node.py": NODE})
        fab = Fab(hashlib.sha256(data).hexdigest(), data, {})
        self.control = self._client(ControlHttpClient, address, "flwr CLI")
        end = time.monotonic() + patience
        while True:
            try:
                return self.control.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id
            except Exception as error:  # of httpx, which is Flower's choice
                if time.monotonic() > end or any(p.poll() is not None for p in self.processes):
                    raise ConnectionError(f"no SuperLink at {address}: {error}") from error
                time.sleep(0.5)

    def send(self, node: int, data: bytes, ttl: float) -> str:
        """Send ``data`` to a SuperNode's ClientApp; return the message's name."""
        from flwr.app import Message
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id, TaskIdentity.run_id = self.task.task_id, self.task.run.run_id
        TaskIdentity.node_id = self.task.context.node_id
        return next(iter(self.grid.push_messages([Message(_content(data), node, "train", ttl=ttl)])))

    def _stop_run(self, run_id: int) -> None:
        from flwr.proto.control_pb2 import StopRunRequest

        with suppress(Exception):  # the SuperLink may be gone
            self.control.StopRun(StopRunRequest(run_id=run_id))

    def _end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def _content(data: bytes) -> Any:
    """Wrap ``data`` as a message's content: an array, which Flower sends in pieces, so of any size."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(data),), stype="safetensors", data=data)
    return RecordDict({"cohort": ArrayRecord({"data": array})})


def entries(params: Mapping[str, torch.Tensor], infos: Mapping[str, ParamInfo], members: Sequence[Member]) -> Served:
    """Return the entries of ``params`` that ``members`` hold; what several hold alike, once."""
    seen, out = set(), []
    for i, m in enumerate(members):
        for name, info in infos.items():
            source = m.part.source(name)
            key = source, *(m.part.index.get(axis) for axis in info.axes if axis is not None)
            if source in params and m.part.holds(info) and key not in seen:
                seen.add(key)
                out.append((i, name, take(params[source], info, m.part)))
    return out


def rebuild(got: Served, infos: Mapping[str, ParamInfo], members: Sequence[Member]) -> dict[str, torch.Tensor]:
    """Rebuild the server's tensors from :func:`entries`, with zeros where nobody holds anything."""
    params: dict[str, torch.Tensor] = {}
    for i, name, value in got:
        info, part = infos[name], members[i].part
        tensor = params.setdefault(part.source(name), torch.zeros(info.shape, dtype=value.dtype))
        scatter_add_(tensor, value - take(tensor, info, part), info, part)
    return params


class FlowerExecutor(Workers):
    """Trains cohorts on SuperNodes; one whose node has gone, is late or answers with nonsense is trained by another.

    Raises ``RuntimeError`` if there is no SuperNode for ``patience_seconds`` too, and ``ValueError`` for a method that
    is not the kit's.
    """

    kind = "SuperNode"

    def __init__(self, federation: Federation, execution: Execution):
        if not (cls := type(federation.method)).__module__.startswith(("fedlib.", "fedlib_lab.")):
            raise ValueError(f"executor = 'flower' sends no code, and {cls.__name__} is of {cls.__module__}; use 'ray'")
        if execution.device == "cpu":
            choose_products(execution.products)
        self.patience, self.seen = execution.patience_seconds, time.monotonic()
        self.link = Link(execution.address, execution.side_by_side(), self.patience)
        self.free: deque[int] = deque()
        self.running: dict[str, Running] = {}  # by message
        try:
            while len(self.free) < (execution.workers or 1):
                self._look()
        except BaseException:
            self.close()
            raise
        super().__init__(federation, execution, execution.workers or len(self.free))

    def _look(self) -> set[int]:
        """Look which SuperNodes are online; those that train nothing are free."""
        online = set(self.link.grid.get_node_ids())
        busy = {node for _, node, *_ in self.running.values()}
        kept = [n for n in self.free if n in online]
        self.free = deque([*kept, *sorted(online - busy - set(kept))])
        now = time.monotonic()
        if online:
            self.seen = now
        elif now - self.seen > self.patience:
            raise RuntimeError(f"no SuperNode was to be had for {self.patience:g} s")
        time.sleep(0.2)
        return online

    def download(self, server: Server) -> Server:
        return server

    def idle(self) -> int | None:
        return self.free.popleft() if self.free else None

    def give(self, worker: int, i: int, download: Server, task: tuple) -> None:
        (members, r, memories), f = task, self.federation
        tensors = entries(download.params, f.setting.infos, members), download.changed
        data = serialise((versions(), f.experiment.to_dict(), r.t, members, *tensors, memories), KINDS)
        self.running[self.link.send(worker, data, self.patience)] = i, worker, time.monotonic(), members

    def finished(self) -> Iterator[Finished]:
        for reply in self.link.grid.pull_messages(list(self.running)):
            i, node, _, members = self.running.pop(reply.metadata.reply_to_message_id)
            self.free.append(node)
            yield i, *self._read(reply, members)
        online = self._look()
        for name, (i, node, since, _) in list(self.running.items()):
            late = time.monotonic() - since > self.patience
            if late or node not in online:
                del self.running[name]
                why = f"took longer than patience_seconds = {self.patience:g}" if late else "has gone"
                yield i, None, TimeoutError(f"SuperNode {node} {why}")

    def _read(self, reply: Any, members: list[Member]) -> tuple[Trained | None, Exception | None]:
        """Return what a SuperNode answered, or the error that makes it unusable; raises what its training raised."""
        if reply.has_error():
            return None, RuntimeError(reply.error.reason)
        try:
            (kind, *answer) = deserialise(reply.content["cohort"]["data"].data, KINDS)
            if kind == "trained":
                return check_trained(answer[0], self.federation, members), None
            name, text = map(str, answer)
        except Exception as error:  # an answer may be anything
            return None, ValueError(f"its answer is not a cohort's: {error}")
        raised = getattr(builtins, name, None)
        known = isinstance(raised, type) and issubclass(raised, Exception)
        raise (raised if known else RuntimeError)(text)  # pyright: ignore

    def home(self, trained: Trained) -> Trained:
        return moved(super().home(trained), self.federation.device)

    def close(self) -> None:
        self.link.close()


def check_trained(trained: Trained, f: Federation, members: Sequence[Member]) -> Trained:
    """Check that ``trained`` has the form that a cohort of ``members`` gives; raises whatever comes up if not."""
    stores, cut = trained.mean  # pyright: ignore
    infos, parts = f.setting.infos, {m.upload or m.part for m in members}

    def need(holds: object, what: str) -> None:
        if not holds:
            raise ValueError(f"{what} is not what the cohort has")

    need(all(store.keys() == stores[0].keys() for store in stores), "its names")
    others = type(f.method).summarise is not Method.summarise  # FLoRA's products
    need(others or stores[0].keys() <= f.server.params.keys(), "one of its names")
    need(cut.keys() <= stores[0].keys(), "one of its slices")
    update = Update(tuple(m.client for m in members), tuple(m.part for m in members), {}, {})
    most = sum(update.weights(f.method.weighting)) * (1 + 1e-9), len(members)  # of weights and of counts
    for target, total in stores[0].items():
        shape = f.server.params[target].shape if target in f.server.params else total.shape
        if target in cut:
            name, part = cut[target]
            need(part in parts and part.source(name) == target, f"the slice of {target}")
            shape = take(torch.empty(infos[name].shape, device="meta"), infos[name], part).shape
        need(total.shape == shape, f"the shape of {target}")
        for x in (total, *(store[target] for store in stores[1:])):
            need(x.dtype == torch.float64 and x.shape in ((), shape), f"the sum of {target}")
    need(trained.nonfinite or all_finite(x for store in stores for x in store.values()), "a number that is not finite")
    sums = ((x, n) for store, n in zip(stores[1:], most, strict=True) for x in store.values())
    need(others or all(0 <= x.min() and x.max() <= n for x, n in sums), "a weight")
    clients, tensors_of = {m.client.id for m in members}, (trained.memories, trained.extras, trained.models)
    need(
        all(d.keys() <= clients for d in (trained.losses, *tensors_of)) and set(trained.nonfinite) <= clients,
        "a client",
    )
    need(all(isinstance(x, float) for x in trained.losses.values()), "a loss")
    for tensors in (t for d in tensors_of for t in d.values()):
        need(all(isinstance(n, str) and isinstance(x, torch.Tensor) for n, x in tensors.items()), "a client's tensors")
    return replace(trained, mean=MaskedMean.of(infos, stores, cut))


# --- on a SuperNode --------------------------------------------------------------------------------------------------


def client_app() -> Any:
    """Build the ClientApp that answers with a trained cohort."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        device = str(context.node_config.get("device", "cpu"))
        return Message(_content(train_message(message.content["cohort"]["data"].data, device)), reply_to=message)

    return app


def train_message(data: bytes, device: str = "cpu") -> bytes:
    """Train the cohort that ``data`` asks for on ``device``; what came of it, or what that raised."""
    try:
        theirs, experiment, t, members, got, changed, memories = deserialise(data, KINDS)
        if theirs != versions():
            raise RuntimeError(f"fedlib and torch are {versions()} on a SuperNode, {theirs} where the run was started")
        become_worker()
        if device == "cpu":
            choose_products()
        f = build_federation(Experiment.from_dict(experiment), device)
        params = move(rebuild(got, f.setting.infos, members), device)
        server = Server(t - 1, params, under("frozen", move(changed, device)))
        trained = train_task(f, server, members, Round(t, (), f.setting), memories)
        return serialise(("trained", replace(trained, mean=trained.mean.parts)), KINDS)
    except Exception as error:
        return serialise(("raised", type(error).__name__, str(error)))
