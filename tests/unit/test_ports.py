"""Ports for servers that tests start: given to nobody else meanwhile, and to be had by who asks for one by number."""

import errno
import socket

import pytest

from tests.ports import free_port


def test_a_port_is_kept_for_who_asks_for_it_by_number():
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind(("127.0.0.1", port))
    assert refused.value.errno == errno.EADDRINUSE
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
