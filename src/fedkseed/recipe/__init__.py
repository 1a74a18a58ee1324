"""Recipes: the typed TOML tables of a run, and the table of algorithms that a recipe chooses from."""
