"""Ports for ranks: one that was given away is not given away again before its ranks have met there."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from det_lightning.strategies import given_ranks
from det_lightning.strategies.given_ranks import free_port

ASKING = """
import sys
from det_lightning.strategies import given_ranks
given_ranks._PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 1)
try:
    print(given_ranks.free_port())
except OSError as error:
    print(error)
"""


def test_a_port_is_given_away_once_here_and_in_other_processes(monkeypatch):
    first = free_port()
    monkeypatch.setattr(given_ranks, "_PORTS", range(first, first + 1))
    with pytest.raises(OSError, match=f"no free loopback port among {first}"):
        free_port()
    asked = subprocess.run([sys.executable, "-c", ASKING, str(first)], capture_output=True, text=True, check=True)
    assert "no free loopback port" in asked.stdout


def test_ranks_meet_at_a_port_that_is_held_for_them(monkeypatch):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True)
    dist.TCPStore("127.0.0.1", port, is_master=False).set("came", "1")
    assert store.get("came") == b"1"
    monkeypatch.setattr(given_ranks, "_PORTS", range(port, port + 1))
    with pytest.raises(OSError, match="no free loopback port"):
        free_port()


def test_no_more_ports_are_held_than_a_process_can_have_open():
    ports = [free_port() for _ in range(3 * given_ranks._KEPT)]
    assert len(set(ports[-given_ranks._KEPT :])) == len(given_ranks._kept) == given_ranks._KEPT
    assert [holder.getsockname()[1] for holder in given_ranks._kept] == ports[-given_ranks._KEPT :]
