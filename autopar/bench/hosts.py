"""Hosts on one machine: network namespaces joined by a bridge, each link limited to a rate, with ranks of torchrun.

Inside a host ranks talk over loopback at the speed of memory; between hosts every byte crosses a shaped link. Needs
root, and ``ip`` and ``tc`` of iproute2. Everything made here is gone when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from autopar.errors import AutoparError

RATE = re.compile(r"[1-9]\d*(kbit|mbit|gbit)|none")
BURST, LATENCY = "256kb", "200ms"  # of the token bucket that shapes a link
PORT = 29555
GRACE, POLL = 5.0, 0.1  # seconds that hosts get to end; between looks at them
NETWORK = "10.99.0"


class Hosts:
    """``hosts`` namespaces of ``ranks`` ranks, with links of ``rate`` (as tc writes it; "none": unlimited).

    Raises AutoparError for a rate that tc does not know, and where root, ``ip`` or ``tc`` is missing.
    """

    def __init__(self, hosts: int, ranks: int, rate: str) -> None:
        if hosts < 1 or ranks < 1:
            raise AutoparError(f"testbed: {hosts} hosts of {ranks} ranks. Legal: 1 or more of both.")
        if not RATE.fullmatch(rate):
            raise AutoparError(f"testbed: --rate {rate} is no rate. Legal: none, or as 200mbit (kbit, mbit, gbit).")
        why = missing()
        if why:
            raise AutoparError(f"testbed: {why}. Run it as root on Linux with iproute2 (apt-get install iproute2).")
        self.hosts, self.ranks, self.rate = hosts, ranks, rate
        self.names = [f"autopar-{os.getpid()}-{h}" for h in range(hosts)]
        self._switch = f"autopar-{os.getpid()}-sw"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        self._handlers = {s: signal.signal(s, _end) for s in (signal.SIGTERM, signal.SIGHUP)}
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and take the namespaces away; their links go with them."""
        self._stop()
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def run(self, arguments: Sequence[str], timeout: float) -> str:
        """``python ARGUMENTS`` on every rank of every host under torchrun; what host 0 printed. Raises AutoparError,
        with the last line of the host that failed first, where one fails or does not end in time."""
        with tempfile.TemporaryDirectory(prefix="autopar-hosts-") as folder, contextlib.ExitStack() as files:
            logs = [Path(folder) / f"host-{h}.log" for h in range(self.hosts)]
            for h, (name, log) in enumerate(zip(self.names, logs, strict=True)):
                out, err = (files.enter_context(log.with_suffix(kind).open("wb")) for kind in (".out", ".err"))
                words = ["ip", "netns", "exec", name, sys.executable, *self._torchrun(h), *arguments]
                env = os.environ | {"GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(words, stdout=out, stderr=err, env=env, start_new_session=True)
                self._running.append(process)
            try:
                failed = self._failed(timeout)
            finally:
                self._stop()
            if failed is not None:
                raise AutoparError(f"testbed: host {failed} failed: {_reason(logs[failed].with_suffix('.err'))}")
            return logs[0].with_suffix(".out").read_text(errors="replace")

    def _failed(self, timeout: float) -> int | None:
        """The host that fails first; None once all have ended well."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            codes = [process.poll() for process in self._running]
            failed = next((h for h, code in enumerate(codes) if code), None)
            if failed is not None or all(code == 0 for code in codes):
                return failed
            time.sleep(POLL)
        raise AutoparError(f"testbed: the hosts did not end within {timeout:g} s. Take fewer cases.")

    def _stop(self) -> None:
        """End what still runs."""
        for number, grace in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + grace
            for process in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.monotonic()))
        self._running.clear()

    def _torchrun(self, host: int) -> list[str]:
        words = f"-m torch.distributed.run --nnodes {self.hosts} --nproc-per-node {self.ranks} --node-rank {host}"
        return [*words.split(), "--master-addr", f"{NETWORK}.1", "--master-port", str(PORT)]

    def _make(self) -> None:
        _ip(f"netns add {self._switch}")
        _ip(f"-n {self._switch} link add br0 type bridge")
        _ip(f"-n {self._switch} link set br0 up")
        for h, name in enumerate(self.names):
            here, there = f"apv{h}-{os.getpid() % 10**6}", f"app{h}-{os.getpid() % 10**6}"
            _ip(f"netns add {name}")
            _ip(f"link add {here} type veth peer name {there}")
            _ip(f"link set {here} netns {name}")
            _ip(f"link set {there} netns {self._switch}")
            _ip(f"-n {name} link set {here} name net0")
            _ip(f"-n {name} addr add {NETWORK}.{h + 1}/24 dev net0")
            _ip(f"-n {name} link set net0 up")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {self._switch} link set {there} master br0")
            _ip(f"-n {self._switch} link set {there} up")
            if self.rate != "none":
                shape = f"tc qdisc add dev net0 root tbf rate {self.rate} burst {BURST} latency {LATENCY}"
                _call(["ip", "netns", "exec", name, *shape.split()])


def missing() -> str:
    """What this machine lacks for hosts; empty where nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root (it makes network namespaces)"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}"
    tried = f"autopar-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", tried], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"may not make network namespaces ({made.stderr.strip()})"


def _ip(words: str) -> None:
    _call(["ip", *words.split()])


def _call(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AutoparError(f"testbed: {' '.join(words)} failed ({done.stderr.strip()}).")


def _reason(log: Path) -> str:
    """The line of a log that says why it ended."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors: Iterator[str] = (line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*Error\b", line))
    return next(errors, lines[-1] if lines else "it printed nothing")


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
