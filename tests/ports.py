"""A port for a server that a test starts, which nobody else is given meanwhile.

Imports nothing but Python's own: tests of clients and of vLLM run where Fledge is not installed.
"""

import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that the system gives to nobody who asks for any, for the next minute.

    One connection to it has just ended here (TIME_WAIT), so it is not free for those. A server that asks for it by
    number and with SO_REUSEADDR, as all do, gets it.
    """
    with socket.socket() as listener, socket.socket() as caller:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        caller.connect(listener.getsockname())
        answering, _ = listener.accept()
        answering.close()  # the end that closes first is the one that waits
        caller.recv(1)
        return int(listener.getsockname()[1])
