"""The C engine of near-far attention under the address and undefined-behaviour sanitisers of gcc, at odd shapes:
causal, in both directions and across two sequences, forward, backward and token by token."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import torch
from crt_exp.nearfar import near_far_attention
from crt_exp.nearfar.choice import Sizes
from crt_exp.nearfar.decoding import RecallState
from crt_exp.attention.engines import native

assert native.library() is not None
for seed in range(60):
    g = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=g))
    group, kv, S, d, dv = pick(1, 3), pick(1, 2), pick(40, 500), pick(1, 70), pick(1, 70)
    L, block = pick(1, S), 8 * 2 ** pick(0, 3)
    sizes = Sizes(block, pick(0, 20), pick(1, 80), open=pick(1, 90), exact_until=pick(0, 200))
    draw = lambda heads, n, k: torch.randn(2, heads, n, k, generator=g).requires_grad_()
    x, y, v = draw(group * kv, L, d), draw(kv, S, d), draw(kv, S, dv)
    keep = None if seed % 2 else torch.rand(2, S, generator=g) < 0.7
    out = near_far_attention(x, y, v, sizes, causal=True, key_mask=keep)
    grads = torch.autograd.grad(out.square().sum(), (x, y, v))
    assert all(t.isfinite().all() for t in (out, *grads))
    both = Sizes(block, *sizes[1:3], seed % 3 > 0)
    out = near_far_attention(x, y, v, both, cross=True, key_mask=keep)
    grads = torch.autograd.grad(out.square().sum(), (x, y, v))
    assert all(t.isfinite().all() for t in (out, *grads))
    x = draw(group * kv, S, d)
    out = near_far_attention(x, y, v, both, key_mask=keep)
    grads = torch.autograd.grad(out.square().sum(), (x, y, v))
    assert all(t.isfinite().all() for t in (out, *grads))
    if seed % 6 == 0:
        with torch.no_grad():
            y, v, state, most = draw(kv, S, d), draw(kv, S, dv), RecallState(sizes, kv), S // 2
            state.take(y[:, :, :most], v[:, :, :most])
            for i in range(most, min(S, most + 60)):
                state.step(*(t[:, :, i:i + 1] for t in (x, y, v)))
print("whole")
"""


def test_nothing_is_read_or_written_beyond_its_end(tmp_path):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc, whose sanitisers are used, is not there")
    find = lambda name: subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    libraries = [find("libasan.so"), find("libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this gcc has no sanitisers")
    env = os.environ | {"CC": "gcc -g -fsanitize=address,undefined -fno-sanitize=alignment", "OMP_NUM_THREADS": "2",
                        "XDG_CACHE_HOME": str(tmp_path), "LD_PRELOAD": " ".join(libraries),
                        "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=900)
    if "ReserveShadowMemoryRange failed" in done.stderr:
        pytest.skip("the address space is limited (ulimit -v): the sanitisers cannot reserve their shadow memory")
    assert done.returncode == 0 and done.stdout.strip() == "whole", done.stderr[-4000:]
