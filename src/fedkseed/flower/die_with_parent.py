"""Becomes another program that ends with its parent, even if that is killed (on Linux; elsewhere when it is stopped).

python -m fedkseed.flower.die_with_parent PARENT PROGRAM ARGUMENT…
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Ask the system, where it is Linux, for a signal when the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # killed before the line above
        sys.exit("the parent has ended")
    os.execvp(command[0], command)  # noqa: S606 - what `Child` was given


if __name__ == "__main__":
    main()
