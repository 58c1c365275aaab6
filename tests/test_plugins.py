"""Names that an installed package brings along: classes and folders, by entry points of a made-up distribution."""

import sys
import tomllib

import pytest
from own_names import RECIPES, section, write_package
from omegaconf import OmegaConf

from crt_exp import Mechanism, plugins
from crt_exp.config import ConfigError, is_known, known, own_names
from crt_exp.presets import node_of
from crt_exp.probes import sources
from crt_exp.runner.command_line import compose
from crt_exp.schema import ATTENTION

WANTING = """
from theirs.baselines import TopK


class Wanting(TopK):
    def __init__(self, heads, d, *, least: int, kinds=("a", "b"), odd=object(), **options):
        super().__init__(heads, d, **options)


class Plain(TopK):
    def __init__(self, heads, d, k=8):
        super().__init__(heads, d)


NUMBER = 3
"""


def entries():
    """Of the page, as a package's metadata has them."""
    (block,) = section("A package", "toml")
    listed = tomllib.loads(block)["project"]["entry-points"][plugins.GROUP]
    return "\n".join(f"{name} = {value}" for name, value in listed.items())


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The page's package, with the page's code, and one that is broken."""
    files = {f"{name}.py": next(block.text for block in RECIPES if block.title == f"mine/{name}.py")
             for name in ("baselines", "maps", "samplers")} | {"wanting.py": WANTING}
    files |= {"conf/sampler/opposed.yaml": "_target_: theirs.samplers.antithetic\n_partial_: true\n",
              "conf/attention/topfour.yaml": "_target_: theirs.baselines.TopK\n_partial_: true\nk: 4\n"}
    site = write_package(tmp_path / "site", "theirs", f"{entries()}\nwanting = theirs.wanting:Wanting\n"
                         "plain = theirs.wanting:Plain\nnumber = theirs.wanting:NUMBER", files)
    write_package(site, "broken", "lost = broken.nothing:Lost\noprf = broken.nothing:Lost", {})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("theirs", "broken")]:
        monkeypatch.delitem(sys.modules, name)
    yield site
    from hydra.core.config_store import ConfigStore  # which keeps what it was told

    for group in ("attention", "features"):
        stored = ConfigStore.instance().repo.get(group, {})
        for name in {"topk.yaml", "wanting.yaml", "plain.yaml", "shifted.yaml"} & {*stored}:
            del stored[name]


@pytest.mark.parametrize("text", ["topk k=3", "topfour", "topfour k=2", "shifted m=8 features.share=0.5",
                                  "favorpp m=8 features=shifted", "favorp m=8 sampler=opposed", "wanting least=2"])
def test_the_library_knows_them_and_saved_models_name_them(text, installed):
    made = Mechanism.parse(text)
    assert Mechanism.parse(str(made)) == made and Mechanism.of_saved(made.saved(), "run") == made
    assert made.saved()["rebuilds"] and made.layer(2, 4) is not None


@pytest.mark.parametrize("typed, text", [
    (["attention=topk", "attention.k=3"], "topk k=3"), (["attention=topk"], "topk"),
    (["attention=topfour"], "topfour"), (["features=shifted", "features.m=8", "features.share=0.5"],
                                         "shifted m=8 sampler=orthogonal features.share=0.5"),
    (["attention=favorp", "sampler=opposed", "features.m=8"], "favorp m=8 sampler=opposed"),
    (["attention=wanting", "attention.least=2"], "wanting least=2")])
def test_the_command_line_composes_them(typed, text, installed):
    cfg = compose(typed)
    made = Mechanism.composed(cfg, {"attention": None, **cfg.hydra.runtime.choices}.get)
    assert made == Mechanism.parse(text)


def test_a_run_and_its_errors(installed, typed):
    run = ["task=uci", "task.repeats=1", "task.sigmas=[0.3]", "logger=none", "features=shifted"]
    code, _, err = typed(*run, "features.share=0.5")
    assert code == 0, err
    for more, said in [(["features.share=2"], "features.share = 2: it takes a number of at least 0 and at most 1"),
                       (["features=shiftet"], "did you mean shifted?"),
                       (["features=lost"], "the plugin lost = broken.nothing:Lost of the package broken"),
                       (["attention=wanting"], "attention.least = ???: it must be given")]:
        code, _, err = typed(*run[:-1], *more) if "=" in more[0] and "share" not in more[0] else typed(*run, *more)
        assert code == 2 and said in err and "Traceback" not in err, err


def test_what_is_broken_is_named_and_hinders_nothing_else(installed):
    assert {"topk", "topfour", "wanting", "favorpp"} <= {*known("attention")} and "lost" not in known("attention")
    assert {"shifted", "oprf"} <= {*known("features")} and "topk" not in known("features")
    assert type(Mechanism.of(features="oprf", m=8).map()).__module__ == "crt_exp.features.exponential"
    for text in ("lost", "favorp features=lost"):
        with pytest.raises(ConfigError, match="plugin lost = broken.nothing:Lost .* cannot be imported: No module"):
            Mechanism.parse(text)
    with pytest.raises(ConfigError, match="plugin number = .*: got 3, expected a class of attention"):
        Mechanism.parse("number")
    with pytest.raises(ConfigError, match="attention: Plain takes no kv_heads"):
        Mechanism.parse("plain")
    with pytest.raises(ConfigError, match="attention.least must be given"):
        Mechanism.parse("wanting")
    with pytest.raises(ConfigError, match="unknown option of attention topk 'kk'; did you mean k"):
        Mechanism.parse("topk kk=3")


def test_no_plugin_is_imported_for_another_name(installed):
    assert is_known("attention", "favorpp") and is_known("attention", "topfour")
    assert not [name for name in sys.modules if name.startswith("theirs.")]


def test_a_package_without_names_is_told(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_package(tmp_path, "empty", "empty = empty\nnone = not_there", {}))
    with pytest.warns(UserWarning, match="plugin .* adds no names: expected a package with a folder conf in it"):
        known("attention")


def test_the_file_of_a_class_holds_plain_defaults(installed):
    node = node_of("theirs.wanting.Wanting", ATTENTION)
    assert node == {"_target_": "theirs.wanting.Wanting", "_partial_": True, "least": "???", "kinds": ["a", "b"],
                    "k": 8} and OmegaConf.create(node)


def test_a_name_of_ones_own_that_a_package_has_is_refused(installed, tmp_path):
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "topfour.yaml").write_text("_target_: crt_exp.attention.Window\n_partial_: true\n")
    with pytest.raises(ConfigError, match="the name topfour is taken by .*theirs"), own_names([tmp_path]):
        pass


def test_the_code_of_a_plugin_decides_the_cells_of_pages_that_name_it(installed):
    spec = {"sizes": {"small": {"parts": [{"arms": {"topk k=4": None}}]}}}
    assert str(installed / "theirs" / "baselines.py").lstrip("/") in " ".join(sources.of_page(spec))
    assert "theirs" not in " ".join(sources.of_page({"sizes": {"small": {"parts": [{"arms": {"window": None}}]}}}))
