"""Local steps of a client on its own data."""
