"""The experiments of the paper, run with this package: `fedkseed reproduce`.

Qin et al., 2024, https://arxiv.org/abs/2312.06353
"""
