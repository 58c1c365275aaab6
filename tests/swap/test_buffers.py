"""Noise and statistics live where their layer computes, also where its weights come from a disk for each call."""

from functools import cache

import accelerate
import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from swap_models import bert, inputs, llama, made, run

import crt_exp
from crt_exp import calibrate_attention, swap_attention

pytestmark = [pytest.mark.usefixtures("one_thread"),
              pytest.mark.filterwarnings("ignore:.*no statistics yet:UserWarning"),
              pytest.mark.filterwarnings("ignore::FutureWarning")]
MECHANISMS = {"favorpp": {"m": 8}, "reformer": {}, "hrf_cluster": {"m": 4}, "hedgehog": {"m": 4}}
WEIGHTS = "model.safetensors"


def split(model):
    """Its first layer in memory, the second on a disk, as accelerate names them."""
    layer = next(path for path, _ in model.named_modules() if path.endswith(("layers.1", "layer.1")))
    places, before = {layer: "disk"}, ""
    for name in layer.split("."):
        others = [child for child, _ in model.get_submodule(before).named_children() if child != name]
        places |= {f"{before}.{child}".lstrip("."): "cpu" for child in others}
        before = f"{before}.{name}".lstrip(".")
    return places


def loading(make, tmp_path):
    bare = {"add_pooling_layer": False} if make is bert else {}
    return {"device_map": split(made(make)), "offload_folder": str(tmp_path / "disk"), **bare}


def empty(make):
    with init_empty_weights():
        return made(make)


def dispatched(model, folder, tmp_path, make):
    return load_checkpoint_and_dispatch(model, str(folder / WEIGHTS), device_map=split(made(make)),
                                        offload_folder=str(tmp_path / "disk"))


# each: (a function of the model's maker, its folder, that of the swapped one, a folder, the swap) -> the swapped model
def swapped_when_on_disk(make, plain, saved, tmp_path, swap):
    return swap(type(made(make)).from_pretrained(plain, **loading(make, tmp_path)))


def swapped_when_dispatched(make, plain, saved, tmp_path, swap):
    return swap(dispatched(empty(make), plain, tmp_path, make))


def swapped_when_empty(make, plain, saved, tmp_path, swap):
    return dispatched(swap(empty(make)), plain, tmp_path, make)


def made_empty_and_loaded_swapped(make, plain, saved, tmp_path, swap):
    with init_empty_weights():
        model = swap(made(make))
    return dispatched(model, saved, tmp_path, make)


def brought_back(make, plain, saved, tmp_path, swap):
    return crt_exp.from_pretrained(type(made(make)), saved, **loading(make, tmp_path))


def offloaded_after(make, plain, saved, tmp_path, swap):
    model = swap(made(make))
    accelerate.disk_offload(model, str(tmp_path / "disk"), execution_device=torch.device("cpu"))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(maker, mechanism) -> folders of the model as it was and swapped, and what the swapped one gives; made once."""
    @cache
    def of(make, name):
        folder, whole = tmp_path_factory.mktemp("saved"), swap_attention(made(make), name, **MECHANISMS[name])
        made(make).save_pretrained(folder / "plain")
        whole.save_pretrained(folder / "saved")
        return folder / "plain", folder / "saved", run(whole, **inputs(make))
    return of


WAYS = [swapped_when_on_disk, swapped_when_dispatched, swapped_when_empty, brought_back, made_empty_and_loaded_swapped,
        offloaded_after]
# Of each way and mechanism the fast tests see one of both models. The rows of hedgehog are weights, which the folder of
# the exact model does not hold.
OFFLOADED = [pytest.param(way, name, make, marks=[] if (number + place) % 2 == (make is bert) else [pytest.mark.slow])
             for number, name in enumerate(MECHANISMS) for place, way in enumerate(WAYS) for make in (llama, bert)
             if not (name == "hedgehog" and way is swapped_when_empty)]


@pytest.mark.parametrize("way, name, make", OFFLOADED, ids=lambda value: getattr(value, "__name__", value))
@torch.no_grad()
def test_offloaded_models_compute_what_whole_ones_do(way, name, make, folders, tmp_path):
    plain, saved, expected = folders(make, name)
    model = way(make, plain, saved, tmp_path, lambda m: swap_attention(
        m, name, saved=False, **MECHANISMS[name])).eval()
    assert not any(t.is_meta for part in model.modules() if "swapped" in part._modules
                   for t in part.swapped.buffers())
    assert torch.equal(run(model, **inputs(make)), expected)


IN_INFERENCE = {"favorpp": {"m": 8, "redraw_every": 1}, "linformer": {"redraw_every": 1}, "auto": {"m": 4},
                "reformer": {"redraw_every": 1}, "nearfar": {"exact_until": 0}, "hedgehog": {"m": 4}}


@pytest.mark.filterwarnings("ignore:.*further from exact attention than uniform attention:UserWarning")
@pytest.mark.parametrize("name", IN_INFERENCE)
def test_what_inference_mode_made_can_be_trained_and_loaded(name, tmp_path):
    make = bert if name in ("linformer", "reformer") else llama
    model, batch = made(make), inputs(make)
    bare = {"add_pooling_layer": False} if make is bert else {}
    with torch.inference_mode():
        swap_attention(model, name, **IN_INFERENCE[name])
        for _ in range(11):                 # redraws, and what is fitted to the first passes
            run(model.train(), **batch)
        if make is llama:
            calibrate_attention(model, [batch])
        model.save_pretrained(tmp_path)
        loaded = crt_exp.from_pretrained(type(model), tmp_path, **bare)
    for one in (model, loaded):
        assert not any(t.is_inference() for t in one.state_dict(keep_vars=True).values())
    loaded.load_state_dict(model.state_dict())
    for _ in range(2):
        run(loaded.train(), **batch).sum().backward()
