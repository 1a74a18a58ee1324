"""Flower's program `flower-superexec`, which shows no token to other users of the machine.

It starts a process for each task: on a client `flwr-clientapp`, on the server `flwr-serverapp`.
"""

from .compat import hide_tokens


def main() -> None:
    """Start processes for tasks until this one is ended."""
    hide_tokens()
    from flwr.supercore.cli import flower_superexec

    flower_superexec()


if __name__ == "__main__":
    main()
