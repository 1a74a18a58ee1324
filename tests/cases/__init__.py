"""Situations from public reports about other programs, each with the right result: a module for each kind of fault.

Inputs are made here, and so are the models (`tiny.py`): random ones of 0.2 million weights.
"""
