#!/usr/bin/env python3
"""Several hosts on one Linux machine: run an MPI program over a network of a set rate.

    scripts/netns_cluster.py --hosts 4 --ranks-per-host 2 --rate 1gbit -- \\
        python -m mpiparallel bench allreduce --bytes 4194304

Every host is a network namespace with one virtual cable to a switch, which is a bridge in a
namespace of its own, and leaves its end of the cable at no more than the rate:

    host 1 ----+
    host 2 ----+---- switch        addresses 10.77.0.1, 10.77.0.2, ... exist only in there
    host 3 ----+

Ranks of one host share memory and ranks of two hosts talk TCP, as on a real cluster; processors,
memory and files are those of the one machine. Needs Linux, root, iproute2 (`ip`, `tc`) and MPICH's
mpirun, which starts its helpers on other hosts through this script. Whatever happens, the
namespaces are deleted in the end, with everything that runs and lies in them. The exit status is
the program's; 77 where no such cluster can be made here, with the reason in one line.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CANNOT = 77  # the exit status that means "skipped" to most test runners
CLUSTER = "MPIPARALLEL_NETNS_CLUSTER"  # the environment variable that tells helpers the name


def main() -> int:
    """Make the cluster, run the command on it, delete it; the exit status."""
    if CLUSTER in os.environ:
        start_on_host(sys.argv[1:])
    parser = argparse.ArgumentParser(description="Run an MPI program on a cluster of namespaces.")
    parser.add_argument("--hosts", type=int, required=True, metavar="N")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, as tc writes it")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that we clean up
    missing = [tool for tool in ("ip", "tc", "mpirun") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return cannot("only root may make network namespaces")
    if missing:
        return cannot(f"there is no {' and no '.join(missing)} here")
    if "HYDRA" not in run("mpirun", "--version"):
        return cannot("the mpirun here is not MPICH's")
    try:
        with cluster(arguments.hosts, arguments.rate) as name:
            return mpirun(name, arguments.hosts, arguments.ranks_per_host, arguments.command)
    except subprocess.CalledProcessError as error:
        return cannot(f"{shlex.join(error.cmd)}: {error.stderr.strip()}")


@contextmanager
def cluster(hosts: int, rate: str) -> Iterator[str]:
    """The name of a cluster, which exists inside the with statement."""
    name = f"mpiparallel-{os.getpid()}"
    switch, made = f"{name}-switch", []
    try:
        for namespace in (switch, *(f"{name}-{host}" for host in range(1, hosts + 1))):
            run("ip", "netns", "add", namespace)
            made.append(namespace)
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, namespace in enumerate(made[1:], start=1):
            port = f"port{host}"
            cable = ("type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "link", "add", "net", "netns", namespace, *cable)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", namespace, "address", "add", f"{address(host)}/24", "dev", "net")
            run("ip", "-n", namespace, "link", "set", "net", "up")
            # A token bucket: what goes out beyond the rate waits, for 400 ms at most.
            bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            run("tc", "-n", namespace, "qdisc", "add", "dev", "net", "root", *bucket)
        yield name
    finally:
        for namespace in made:
            for process in run("ip", "netns", "pids", namespace).split():
                os.kill(int(process), signal.SIGKILL)
            run("ip", "netns", "delete", namespace)


def mpirun(name: str, hosts: int, ranks_per_host: int, command: list[str]) -> int:
    """Run the command with its first rank on the first host; its exit status."""
    places = ",".join(f"{address(host)}:{ranks_per_host}" for host in range(1, hosts + 1))
    launch = ["mpirun", "-launcher", "ssh", "-launcher-exec", str(Path(__file__).resolve())]
    launch += ["-localhost", address(1), "-hosts", places, "-n", str(hosts * ranks_per_host)]
    launch += ["-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "tcp"]
    inside = ["ip", "netns", "exec", f"{name}-1", *launch, *command]
    return subprocess.run(inside, env=os.environ | {CLUSTER: name}, check=False).returncode


def start_on_host(arguments: list[str]) -> None:
    """Be the remote shell that mpirun asks for: [-x] ADDRESS COMMAND... Does not return."""
    host, *command = (argument for argument in arguments if argument != "-x")
    namespace = f"{os.environ[CLUSTER]}-{host.rpartition('.')[2]}"
    os.execvp("ip", ["ip", "netns", "exec", namespace, "sh", "-c", " ".join(command)])


def address(host: int) -> str:
    """The address of a host, counted from 1."""
    return f"10.77.0.{host}"


def run(*command: str) -> str:
    """What the command prints; CalledProcessError where it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cannot(reason: str) -> int:
    """Say why there is no cluster."""
    print(f"netns_cluster: {reason}", file=sys.stderr)
    return CANNOT


if __name__ == "__main__":
    sys.exit(main())
