"""Tuning a user's own model and loss from Python: `fk.Trainer` and `fk.tune`."""
