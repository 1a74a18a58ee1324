"""A run: its parts on this machine, its rounds, its directory."""
