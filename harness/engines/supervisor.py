"""Run a server that ends with the process that started it: `harness.engines.supervisor COMMAND`.

Standard input is a pipe whose other end only the run holds. When the run ends, by whatever signal,
the system closes that end; the read here returns, and the server's process group is stopped. This
works on every system, and for servers that start processes of their own: processes that remain are
killed and waited for. Otherwise a process that ends slowly, such as vLLM's EngineCore, would still
hold memory of the card when the next server starts.

The first line of standard output is the server's process id. The server's output goes to standard
error, which the run redirects to a log. The exit status is the server's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import psutil

# Seconds from SIGTERM to SIGKILL, and from SIGKILL until the processes must be gone
GRACE_S = 5.0
LEFT_POLL_S = 0.02


def main() -> None:
    """Start the server of the command line, and wait until the run or the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted run closes its servers itself
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
    """Exit with the server's status when it has ended, and all its processes with it."""
    status = server.wait()
    give_up = time.monotonic() + GRACE_S
    while _runs(server.pid) and time.monotonic() < give_up:
        with suppress(OSError):
            os.killpg(server.pid, signal.SIGKILL)
        time.sleep(LEFT_POLL_S)
    os._exit(status if status >= 0 else 128 - status)


def stop(server: "subprocess.Popen[bytes]") -> None:
    """Stop the server and its process group; `leave_with` kills processes that remain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            os.killpg(server.pid, signal.SIGCONT)  # a paused process handles signals when resumed
            server.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return


def _runs(group: int) -> bool:
    """True while a process of the group runs; a zombie, which a container may keep, does not."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


if __name__ == "__main__":
    main()
