"""Swapped models whose weights come from a disk for each call, and models made in inference mode."""

import accelerate
import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from helpers.swap_models import (
    alike,
    back,
    bert,
    build_model,
    inputs,
    llama,
    run,
)

from crt_exp import calibrate_attention, swap_attention

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning",
        "ignore:.*no statistics yet:UserWarning",
        "ignore::FutureWarning",
    ),
]


def places(model):
    """Its first layer in memory, the second on a disk, as accelerate names them."""
    layer = next(
        path for path, _ in model.named_modules() if path.endswith(("layers.1", "layer.1"))
    )
    actual = {layer: "disk"}
    before = ""
    for name in layer.split("."):
        others = []
        for child, _ in model.get_submodule(before).named_children():
            if child != name:
                others.append(child)
        actual |= {f"{before}.{child}".lstrip("."): "cpu" for child in others}
        before = f"{before}.{name}".lstrip(".")
    return actual


def dispatched(model, folder, tmp_path):
    return load_checkpoint_and_dispatch(
        model,
        str(folder / "model.safetensors"),
        device_map=places(model),
        offload_folder=str(tmp_path / "disk"),
    )


def swapped_when_empty(make, swap, tmp_path):
    with init_empty_weights():
        model = build_model(make)
    return dispatched(swap(model), tmp_path / "plain", tmp_path)


def brought_back(make, swap, tmp_path):
    return back(
        tmp_path / "saved",
        make,
        device_map=places(build_model(make)),
        offload_folder=str(tmp_path / "disk"),
    )


def offloaded_after(make, swap, tmp_path):
    model = swap(build_model(make))
    accelerate.disk_offload(model, str(tmp_path / "disk"), execution_device=torch.device("cpu"))
    return model


OFFLOADED = {
    "favorpp": (llama, {"m": 8}),
    "reformer": (bert, {}),
    "hrf_cluster": (llama, {"m": 4}),
    "hedgehog": (bert, {"m": 4}),
}


@pytest.mark.parametrize(
    "way, name",
    [
        (swapped_when_empty, "hrf_cluster"),
        (swapped_when_empty, "reformer"),
        (offloaded_after, "hedgehog"),
        (brought_back, "hrf_cluster"),
        (brought_back, "favorpp"),
    ],
)
@torch.no_grad()
def test_offloaded_models_compute_what_whole_ones_do(way, name, tmp_path):
    make, options = OFFLOADED[name]

    def swap(model):
        return swap_attention(model, name, saved=False, **options)

    whole = swap(build_model(make))
    build_model(make).save_pretrained(tmp_path / "plain")
    whole.save_pretrained(tmp_path / "saved")
    model = way(make, swap, tmp_path).eval()
    for part in model.modules():
        if "swapped" in part._modules:
            assert not any(t.is_meta for t in part.swapped.buffers())
    assert alike(model, whole, make)


@pytest.mark.parametrize(
    "make, name, options",
    [
        (llama, "favorpp", {"m": 8, "redraw_every": 1}),
        (bert, "reformer", {"redraw_every": 1}),
        (llama, "auto", {"m": 4}),
    ],
)
def test_models_made_in_inference_mode_can_be_trained_and_loaded(make, name, options, tmp_path):
    model = build_model(make)
    batch = inputs(make)
    with torch.inference_mode():
        swap_attention(model, name, **options)
        for _ in range(11):  # redraws, and what is fitted to the first passes
            run(model.train(), **batch)
        if make is llama:
            calibrate_attention(model, [batch])
        model.save_pretrained(tmp_path)
        loaded = back(tmp_path, make)
    for one in (model, loaded):
        assert not any(t.is_inference() for t in one.state_dict(keep_vars=True).values())
    loaded.load_state_dict(model.state_dict())
    for _ in range(2):
        run(loaded.train(), **batch).sum().backward()
