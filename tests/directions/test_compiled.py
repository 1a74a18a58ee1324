"""The machine code that Triton makes of its kernels for an NVIDIA GPU, which needs no GPU: exact operations only."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from . import PLAIN

COMPILE = """
import json, re, sys
import numpy as np, torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from fedkseed import Pool
from fedkseed.directions import triton_gpu

class Hopper(DriverBase):  # a driver without a device: enough to compile
    def __init__(self): pass
    @classmethod
    def is_active(cls): return True
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def get_benchmarker(self): return None
    def map_python_to_cpp_type(self, kind): return kind

class Compiled:  # a kernel that is compiled where it would be launched
    def __init__(self, kernel): self.kernel = kernel
    def __getitem__(self, grid):
        def launch(*args, **options):
            code = self.kernel.warmup(*args, grid=grid, **options)
            assert code.asm["cubin"]
            found[self.kernel.__name__] = code.asm["ptx"]
        return launch

triton.runtime.driver.set_active(Hopper())
found = {}
for name, kernel in list(vars(triton_gpu).items()):
    if isinstance(kernel, triton.JITFunction) and name in sys.argv[2:]:
        setattr(triton_gpu, name, Compiled(kernel))
pool, w, v = Pool(1 << 63, 64, sys.argv[1]), torch.zeros(8200, dtype=torch.bfloat16), torch.zeros(8200)
directions = np.arange(3, dtype=np.uint32)
plan = triton_gpu.plan(pool, directions, np.ones(3, np.float32), w.device)
triton_gpu.combine([(1, 5, w, w, None)], plan)
triton_gpu.project([(1, 5, v)], pool)
print(json.dumps(found))
"""
KERNELS = {
    "direct": ["_combine_sum", "_products", "_add_rows"],
    "transformed": ["_combine_transformed", "_project_transformed", "_walsh", "_add_rows"],
}


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed: it has no packages for this system")
@pytest.mark.parametrize("family", PLAIN)
def test_kernels_for_an_nvidia_gpu_fuse_flush_and_approximate_nothing(family, tmp_path):
    kernels = KERNELS["direct" if family in ("gaussian", "rademacher") else "transformed"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, family, *kernels]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    code = json.loads(done.stdout)
    assert set(code) == set(kernels) - ({"_walsh"} if family == "hadamard" else set())  # which needs it beyond 2^14
    for name, text in code.items():
        inexact = {word for word in text.split() if word.startswith("fma.") or ".ftz" in word or ".approx" in word}
        assert not inexact, f"{name}: {inexact}"
    assert ("sqrt.rn.f32" in code[kernels[0]]) == (family == "gaussian")
