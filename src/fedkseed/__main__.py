"""`python -m fedkseed` is the command `fedkseed`."""

from .cli import main

main()
