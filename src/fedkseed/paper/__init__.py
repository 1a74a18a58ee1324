"""The experiments of Qin et al., 2024 (https://arxiv.org/abs/2312.06353), repeated by `fedkseed reproduce`."""
