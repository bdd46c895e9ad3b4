"""Processes that wait for others say so, and in the end who is missing."""

import os
import subprocess
import sys

import pytest

from tests.support.s3 import free_port

CODE = """
import sys
from diloco.errors import PeerLost
from diloco.world import own_world
from diloco.rendezvous import meet
try:
    meet(own_world(1, None), patience=5)
except PeerLost as error:
    sys.exit(f"lost: {error}")
"""


def come(rank, port):
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    return subprocess.Popen([sys.executable, "-c", CODE], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_comes_alone_says_what_it_waits_for_and_ends_with_the_reason(rank):
    port = free_port()
    process = come(rank, port)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"waiting for 2 processes to come to 127.0.0.1:{port}\n" in err
    assert f"lost: 2 processes did not meet at 127.0.0.1:{port} within 5 s: start all of them" in err.splitlines()[-1]


def test_two_meet_without_a_word():
    port = free_port()
    processes = [come(rank, port) for rank in (0, 1)]
    assert [process.communicate(timeout=60) and process.returncode for process in processes] == [0, 0]
