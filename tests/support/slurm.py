"""A Slurm cluster on this machine: munged, slurmctld and a slurmd for each of its nodes, which share the machine.

The daemons have an /etc/hosts of their own, in which the names of the nodes are this machine. Needs root for that.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NODES = ("site0", "site1")
PATIENCE = 120.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        return [sockets.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo",
                            "OMP_NUM_THREADS": "1"}  # fmt: skip
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        config = CONFIG.format(folder=self.folder, host=host, nodes=NODES, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "state").mkdir()
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        hosts = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(hosts + "".join(f"127.0.0.1 {node}\n" for node in (*NODES, host)))
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "seed"}  # fmt: skip
        places = [f"--{flag}={self.folder / name}" for flag, name in files.items()]
        self._run("munged", "--foreground", "--force", *places)
        self._until(lambda: (self.folder / "munge.sock").exists(), "munged does not listen")
        self._run("slurmctld", "-D")
        for node in NODES:
            self._run("slurmd", "-D", "-N", node)
        self._until(lambda: self._idle() == len(NODES), "the nodes are not idle")

    def _run(self, *words: str) -> None:
        inside = f"mount --bind {self.folder}/hosts /etc/hosts && exec {' '.join(words)}"
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(["unshare", "--mount", "sh", "-c", inside], env=self.environment, stdout=log,
                                 stderr=log, start_new_session=True)
            )  # fmt: skip

    def _idle(self) -> int:
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%t"], env=self.environment, capture_output=True, text=True)
        return done.stdout.split().count("idle")

    def _until(self, holds: object, what: str) -> None:
        assert callable(holds)
        deadline = time.monotonic() + PATIENCE
        while not holds():
            logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{what}:\n{logs}"
            assert all(daemon.poll() is None for daemon in self._daemons), logs
            time.sleep(0.1)

    def submit(self, *words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run srun or sbatch --wait, and wait for its end."""
        return subprocess.run(words, env={**self.environment, **more}, cwd=cwd, capture_output=True, text=True,
                              timeout=900)  # fmt: skip

    def stop(self) -> None:
        subprocess.run(["scancel", "--full", "--state=RUNNING"], env=self.environment, capture_output=True)
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def script(path: Path, options: Sequence[str], body: str) -> Path:
    """A batch script."""
    path.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {option}\n" for option in options) + body)
    return path
