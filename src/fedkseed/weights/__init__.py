"""Weights as a function of K numbers: their layout, and the ways to hold them while a model runs."""
