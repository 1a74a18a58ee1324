"""Scores of a model on held-out examples: loss, Rouge-L, objectives, and their errors."""
