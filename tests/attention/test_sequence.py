"""A sequence split over processes: outputs and gradients are those of one process with the whole of it."""

import itertools
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from maps import independent

from crt_exp import samplers
from crt_exp.attention import Generalized, RandomFeatureAttention, attention
from crt_exp.features import OPRF, SDERF, AngularHybrid, AutoRF, ClusteredHybrid, GeomRF, PosRF, Statistics, TrigRF

pytestmark = pytest.mark.filterwarnings("ignore:.*denominators are not positive:RuntimeWarning")
CUTS = {2: (0, 5, 14), 3: (0, 6, 7, 14)}  # parts of different length


def tensors(dtype, Hkv=2):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    mask = torch.rand(2, 14, generator=g) > 0.3
    mask[0, :7] = False  # all keys of the first process
    return 0.5 * draw(2, 2, 14, 4), 0.5 * draw(2, Hkv, 14, 4), draw(2, Hkv, 14, 3), mask, draw(2, 2, 14, 3)


def cases(some):
    """(map, options of attention, masked, dtype, tolerance). some: of each map two, which take both values of both."""
    for number, phi in enumerate((OPRF(), SDERF(antithetic=True), TrigRF(), GeomRF(), Generalized(f="relu"))):
        for causal, masked in itertools.product((False, True), (False, True)):
            if not some or (number + causal + masked) % 2 == 0:
                yield phi, {"causal": causal}, masked, torch.float64, 1e-9
    for phi in (AngularHybrid(), ClusteredHybrid()):
        yield phi, {"causal": True, "denominator": "clamp"}, True, torch.float64, 1e-9
    yield OPRF(), {"causal": True, "scale": 0.7}, True, torch.float32, 1e-4
    yield TrigRF(), {"causal": True, "denominator": "clamp", "scale": 0.7}, False, torch.float64, 1e-9
    yield TrigRF(), {"normalize": False}, False, torch.float64, 1e-9


def results(function, x, y, v, mask, grad):
    """Outputs and gradients of one call."""
    x, y, v = (t.detach().clone().requires_grad_() for t in (x, y, v))
    out = function(x, y, v, mask)
    return [out.detach(), *torch.autograd.grad(out, (x, y, v), grad)]


def compare(function, part, Hkv=2, dtype=torch.float64, masked=True, tolerance=1e-9):
    """function(x, y, v, key_mask, group) of the parts, against that of the whole without a group."""
    x, y, v, mask, grad = tensors(dtype, Hkv)
    y, v = (t.masked_fill(~mask[:, None, :, None], torch.nan) if masked else t for t in (y, v))
    mask = mask if masked else None
    whole = results(lambda *a: function(*a, None), x, y, v, mask, grad)
    cut = lambda t: t[:, :, part]
    mask = None if mask is None else mask[:, part]
    ours = results(lambda *a: function(*a, dist.group.WORLD), *map(cut, (x, y, v)), mask, cut(grad))
    for name, a, b in zip(("out", "dx", "dy", "dv"), ours, whole, strict=True):
        assert a.isfinite().all(), name
        assert (a - cut(b)).abs().max() <= tolerance * b.abs().max(), name


def attention_in_parts(part, some=False):
    for number, (phi, options, masked, dtype, tolerance) in enumerate(cases(some)):
        for Hkv in (1 + number % 2,) if some else (1, 2):
            g = torch.Generator().manual_seed(1)
            noise = independent(phi, lambda g=g: samplers.orthogonal(6, 4, g, batch=(2,), dtype=torch.float64))
            x, y, *_ = tensors(torch.float64)
            params = phi.fit(Statistics.of(x, y))
            function = lambda x, y, v, mask, group, phi=phi, noise=noise, params=params, options=options: attention(
                x, y, v, phi, noise, params, key_mask=mask, group=group, **options)
            try:
                compare(function, part, Hkv, dtype, masked, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{phi} {options} masked={masked} {dtype} Hkv={Hkv}: {error}") from None


def layers_in_parts(part, some=False):
    """The parameters are those of the whole sequence."""
    kinds = {}, {"causal": True}, {"kv_heads": 1}
    for number, phi in enumerate((OPRF(), SDERF(), PosRF(), GeomRF())):
        for options in (kinds[number % 3],) if some else kinds:
            layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, 2, 4, **options).double().eval()
            if layer.running:
                with torch.no_grad(), layer.calibration():
                    x, y, v, *_ = tensors(torch.float64)
                    layer(x, y, v)

            def function(x, y, v, mask, group, layer=layer):
                layer.group = group
                return layer(x, y, v, mask)

            compare(function, part, options.get("kv_heads", 2))


def clusters_of_all_processes(part):
    """They are fitted to the vectors of all, and the same on each, also where one has none but padding."""
    for phi in (ClusteredHybrid(), AutoRF()):
        parameters_of_all_processes(phi, part)


def parameters_of_all_processes(phi, part):
    layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, 2, 4, fit_steps=1)
    x, y, v, mask, _ = tensors(torch.float32)
    for _ in range(2):
        keep = mask[:, part] if part.start else torch.zeros_like(mask[:, part])
        layer(x[:, :, part], y[:, :, part], v[:, :, part], keep)
    assert layer.clusters.done
    for t in layer.clusters.params():
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t.contiguous())
        assert t.isfinite().all() and all(torch.equal(parts[0], other) for other in parts)


def refusals(part):
    noise, x = samplers.iid(6, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match="each token is a query and a key"):
        attention(x[:, :, :3], x, x, PosRF(), noise, causal=True, group=dist.group.WORLD)
    with pytest.raises(ValueError, match="cannot be compiled"):
        torch.func.grad(lambda x: attention(x, x, x, PosRF(), noise, group=dist.group.WORLD).sum())(x)


def disagreements(part):
    """Found before anything else is exchanged: they were a crash of gloo, or a wait of half an hour."""
    first, x, mask = part.start == 0, torch.ones(2, 2, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    others = {"dtype is torch.float32 on rank 0 and torch.float64 on rank 1": ((x.double(),) * 3, None),
              "batch is 2 on rank 0 and 1": ((x[:1],) * 3, None), "heads is 2 on rank 0 and 1": ((x[:, :1],) * 3, None),
              "mask is 0 on rank 0 and 1": ((x,) * 3, mask), "gradient is 0 on rank 0 and 1": (
                  (x.clone().requires_grad_(),) * 3, None), "values is 4 on rank 0 and 3": ((x, x, x[..., :3]), None)}
    for words, (inputs, keep) in others.items():
        inputs, keep = ((x,) * 3, None) if first else (inputs, keep)
        for phi in (PosRF(), OPRF(), TrigRF()):
            layer = RandomFeatureAttention(phi, samplers.orthogonal, 6, inputs[0].shape[1], 4).eval()
            layer.group = dist.group.WORLD
            with pytest.raises(ValueError, match=f"the processes of a sequence disagree: {words}"):
                layer(*inputs, keep)


def work(rank, size, meeting, body, errors):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        body(slice(*CUTS[size][rank:rank + 2]))
    except BaseException:
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        raise
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that still hold a tensor of Python would abort the interpreter while it ends


def everything(part, some=False):
    attention_in_parts(part, some)
    layers_in_parts(part, some)
    clusters_of_all_processes(part)
    refusals(part)
    disagreements(part)


def some_of_everything(part):
    """Every map, option and refusal, not every combination."""
    everything(part, some=True)


@pytest.mark.parametrize("body, size", [(some_of_everything, 2), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in (
    (everything, 2), (attention_in_parts, 3)))])
def test_parts_on_processes_equal_the_whole(body, size, tmp_path):
    context = mp.get_context("spawn")
    errors = context.SimpleQueue()
    given = size, tmp_path / "meeting", body, errors
    workers = [context.Process(target=work, args=(rank, *given)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert all(worker.exitcode == 0 for worker in workers), (
        errors.get() if not errors.empty() else [worker.exitcode for worker in workers])


@pytest.mark.slow
def test_the_documented_program(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "sequence_parallel.md").read_text()
    program = tmp_path / "split.py"
    program.write_text(text.split("```python\n")[1].split("```")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "rank 0: 500 of 1000 tokens, equal to the whole" in done.stdout and "rank 1: 500" in done.stdout
