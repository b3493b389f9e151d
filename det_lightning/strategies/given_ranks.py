"""Ranks that somebody else started: the environment Lightning reads when a group of processes already exists."""

import os
import secrets
import socket
from collections import deque
from importlib import import_module
from typing import Any

_PORTS = range(10_000, 32_000)
"""Below the ports that systems give to outgoing connections, which would take one between the look and the use."""

_kept: deque[socket.socket] = deque()
_KEPT = 64


def free_port() -> int:
    """A loopback port that nobody uses, and that no other call gives away, here or in another process: until 64 more were
    asked for, or this process ends."""
    for _ in range(1000):
        port, holder = secrets.choice(_PORTS), socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        # Ranks share an address with a socket that does not listen if both allow it; a holder, which asks first, does not.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _kept.append(holder)
        if len(_kept) > _KEPT:
            _kept.popleft().close()
        return port
    raise OSError(f"no free loopback port among {_PORTS.start} to {_PORTS.stop - 1}")


def given_ranks(rank: int, world_size: int, port: int, *, namespace: str = "lightning.fabric") -> Any:
    """A Lightning ClusterEnvironment for one of `world_size` processes of this host that meet at a loopback port.

    Args:
        namespace: of the ClusterEnvironment class, "lightning.fabric" or "lightning_fabric".
    """
    base = import_module(f"{namespace}.plugins.environments").ClusterEnvironment
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    class GivenRanks(base):
        creates_processes_externally = True
        main_address = "127.0.0.1"
        main_port = port

        @staticmethod
        def detect() -> bool:
            return False

        def world_size(self) -> int:
            return world_size

        def set_world_size(self, size: int) -> None:
            """Fixed."""

        def global_rank(self) -> int:
            return rank

        def set_global_rank(self, rank: int) -> None:
            """Fixed."""

        def local_rank(self) -> int:
            return rank

        def node_rank(self) -> int:
            return 0

    return GivenRanks()
