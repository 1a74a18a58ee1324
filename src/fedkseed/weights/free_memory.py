"""The memory that is free on a device."""

from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")  # with the limits of a container


def available(device: str = "cpu") -> int:
    """Bytes that are free on a device: on a CPU those that the system, or this process's group, can still give."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    try:
        most, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such files; no limit, which is written "max"
        return free
    return max(0, min(free, most - used + int(stat["inactive_file"])))
