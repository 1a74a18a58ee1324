"""Recipes: the typed TOML of a run, and the table of algorithms that it chooses from."""
