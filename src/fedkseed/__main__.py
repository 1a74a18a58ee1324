"""Entry point of `python -m fedkseed`, which does the same as the command `fedkseed`."""

from .cli import main

main()
