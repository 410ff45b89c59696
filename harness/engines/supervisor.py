"""Run a server that ends with the process that wants it: python -m harness.engines.supervisor CMD.

Standard input is a pipe whose other end only the run holds. When the run ends, by whatever signal,
the system closes that end; the read here returns, and the server's process group is stopped. That
works on every system, and for servers that start processes of their own.

The first line of standard output is the server's process id. Its own output goes to standard
error, which the run points at a log. The exit status is the server's.
"""

import os
import signal
import subprocess
import sys
import threading

# From the polite signal to the one that cannot be refused
GRACE_S = 5.0


def main() -> None:
    """Start the command line's server, wait for the end of the run or its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run that is interrupted closes its servers
    server = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
    )
    signal.signal(signal.SIGTERM, lambda *_: stop(server))
    sys.stdout.write(f"{server.pid}\n")
    sys.stdout.flush()
    threading.Thread(target=leave_with, args=(server,), daemon=True).start()
    sys.stdin.buffer.read()
    stop(server)


def leave_with(server: "subprocess.Popen[bytes]") -> None:
    """End as the server ends."""
    status = server.wait()
    os._exit(status if status >= 0 else 128 - status)


def stop(server: "subprocess.Popen[bytes]") -> None:
    """Stop the server with everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    main()
