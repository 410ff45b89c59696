"""Run a server that ends with the process that wants it: python -m harness.engines.supervisor CMD.

Standard input is a pipe whose other end only the run holds. When the run ends, by whatever signal,
the system closes that end; the read here returns, and the server's process group is stopped. That
works on every system, and for servers that start processes of their own: what they leave behind is
killed, and waited for. A process that ends slowly may hold a card's memory (vLLM's EngineCore is
a child), which the next server would not find free.

The first line of standard output is the server's process id. Its own output goes to standard
error, which the run points at a log. The exit status is the server's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

# From the polite signal to the one that cannot be refused, and for what that one kills to be gone
GRACE_S = 5.0
LEFT_POLL_S = 0.02


def main() -> None:
    """Start the command line's server, wait for the end of the run or its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run that is interrupted closes its servers
    server = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    signal.signal(signal.SIGTERM, lambda *_: stop(server))
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.flush()
    leaves = threading.Thread(target=leave_with, args=(server,), daemon=True)
    leaves.start()
    sys.stdin.buffer.read()
    stop(server)
    leaves.join(2 * GRACE_S)


def leave_with(server: "subprocess.Popen[bytes]") -> None:
    """End as the server ends, after everything that it started."""
    status = server.wait()
    give_up = time.monotonic() + GRACE_S
    while _runs(server.pid) and time.monotonic() < give_up:
        with suppress(OSError):
            os.killpg(server.pid, signal.SIGKILL)
        time.sleep(LEFT_POLL_S)
    os._exit(status if status >= 0 else 128 - status)


def stop(server: "subprocess.Popen[bytes]") -> None:
    """Stop the server; what it started is stopped too, at last by `leave_with`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            os.killpg(server.pid, signal.SIGCONT)  # one that is paused ends when it goes on
            server.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def _runs(group: int) -> bool:
    """Whether a process of the group runs; a zombie, which a container may keep, does not."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    main()
