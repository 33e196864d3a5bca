"""Runs a command for a parent, and ends it with all its children when the parent ends, however that happens.

    python guard.py GRACE COMMAND...

The parent holds the other end of standard input: closing it, or being killed, ends the command: a SIGTERM to its
process group, and SIGKILL to what is left of it GRACE seconds later. The exit status is the command's. Knows nothing
of Fledge: it must start at once.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    grace, command = float(sys.argv[1]), sys.argv[2:]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")

    def signal_group(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # all have gone
            os.killpg(child.pid, number)

    def end_with_parent() -> None:
        while os.read(0, 1):
            pass
        signal_group(signal.SIGTERM)
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            signal_group(signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    signal_group(signal.SIGKILL)  # workers that outlived it
    sys.stdout.flush()
    if status < 0:  # as it went, so that whoever reads the status knows
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
