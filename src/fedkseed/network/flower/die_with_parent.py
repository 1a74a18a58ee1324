"""A program that becomes another one, which ends with its parent (on Linux even if the parent is killed).

python -m fedkseed.network.flower.die_with_parent PARENT PROGRAM ARGUMENT…
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Ask Linux to send this process a signal when its parent ends; do nothing on other systems."""
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
