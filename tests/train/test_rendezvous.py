"""Processes that wait for others say so, and in the end who is missing."""

import os
import socket
import sys

import pytest
import torch.distributed as dist

from diloco.errors import PeerLost
from diloco.exchange import rendezvous
from diloco.exchange.world import own_world
from tests.support.commands import Command, ended
from tests.support.s3 import free_port


def meet(rank, port, patience):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}  # fmt: skip
    if patience < rendezvous.QUIET:
        rendezvous.QUIET = 0.0  # as if the time had passed after which a process says what it waits for
    try:
        rendezvous.meet(own_world(1, None), patience=patience)
    except PeerLost as error:
        sys.stderr.write(f"lost: {error}\n")
        return 1
    dist.barrier()  # the first holds the store: it must not end before the other one is connected
    return 0


@pytest.mark.slow
def test_one_that_comes_alone_says_what_it_waits_for_and_ends_with_the_reason(tmp_path):
    port = free_port()
    code, _, err = ended(Command(tmp_path, meet, 1, port, 2.0))
    assert code == 1
    assert f"waiting for 2 processes to meet at 127.0.0.1:{port}\n" in err
    assert f"lost: 2 processes did not meet at 127.0.0.1:{port} within 2 s: start all of them" in err.splitlines()[-1]


@pytest.mark.slow
def test_two_meet_without_a_word(tmp_path):
    port = free_port()
    pair = [Command(tmp_path, meet, rank, port, 600.0) for rank in (0, 1)]
    assert [ended(process) for process in pair] == [(0, "", "")] * 2


def _reached(address, port):
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers at all of 127.0.0.0/8")
@pytest.mark.parametrize("at", ["127.0.0.1", "localhost", "127.0.0.3"])
def test_the_store_listens_at_the_given_address_only(at):
    port = free_port()
    address = "127.0.0.1" if at == "localhost" else at
    store = rendezvous.meet_at(f"{at}:{port}", 0, 0, 1, 60.0)
    again = rendezvous.meet_at(f"{at}:{port}", 0, 0, 1, 60.0)  # a second reducer in the same process
    store.set("key", "value")
    assert again.get("key") == b"value"
    assert _reached(address, port) and not _reached("127.0.0.2", port)


def test_an_address_of_a_router_in_front_of_this_machine_is_no_error():
    port = free_port()
    assert rendezvous._listener("192.0.2.1", port) is None  # reserved for documentation: no machine has it
