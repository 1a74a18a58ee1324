"""Flower's program `flwr-serverapp`, whose token comes in the environment (superexec.py)."""

from ..compat import take_token


def main() -> None:
    """Run the ServerApp of one of Flower's runs."""
    take_token()
    from flwr.superlink.cli import flwr_serverapp

    flwr_serverapp()


if __name__ == "__main__":
    main()
