"""Finished models: load, export, card, endpoint, evaluation."""
