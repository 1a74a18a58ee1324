"""The experiments of the paper, repeated with this package by `fedkseed reproduce`.

Qin et al., 2024, https://arxiv.org/abs/2312.06353
"""
