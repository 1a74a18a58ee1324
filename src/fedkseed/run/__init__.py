"""Runs: their parts on this machine, their rounds, their directories."""
