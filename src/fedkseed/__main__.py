"""Entry point of the command `fedkseed`, and of `python -m fedkseed`."""

import sys


def main() -> None:
    """Run the command line, whose own modules are read here: Ctrl-C meanwhile is a line and an exit code, too."""
    try:
        from .cli import main as command

        command()
    except KeyboardInterrupt:
        print("fedkseed: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
