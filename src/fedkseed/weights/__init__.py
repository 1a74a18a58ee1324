"""Weights as a function of K numbers: their layout, and where they live while a model runs."""
