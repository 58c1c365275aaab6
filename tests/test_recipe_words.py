"""Full sizes of pages are recipes: their commands are the words of conf/recipes.yaml, which is read here by itself."""

from functools import cache

import pytest
import yaml

from crt_exp import recipe_words
from crt_exp.config import CONF, ConfigError
from crt_exp.outlines import Facts
from crt_exp.probes import training
from crt_exp.report import page

DECLARED = yaml.safe_load((CONF / "recipes.yaml").read_text())["recipes"]
SOURCES = ("tasks/lra.py",)
SIZES = {name: yaml.load((CONF / f"report/{name}.yaml").read_text(), page.SAFE).get("sizes") or {}
         for name in page.names()}
OF_PAGES = [(name, size, given) for name, sizes in SIZES.items() for size, sized in sizes.items()
            for given in (sized or {}).get("runs", []) if "recipe" in given]


@cache
def full(name):
    """Of a page at full: its grids, the models of its starts, and the words of every run that it trains."""
    size = page.load(name)["sizes"].get("full") or {}
    models = training.last(size.get("starts", {}), SOURCES)
    grids = [training.Grid.read(given, models) for given in size.get("runs", [])]
    runs = [key["overrides"] for grid in grids for trial in grid.trials()
            for key in trial.keys([*trial.settings], SOURCES).values()]
    starts = [key["overrides"] for given in size.get("starts", {}).values()
              for line in training.stages("", given, SOURCES) for key in line]
    return [*runs, *starts]


def typed(recipe):
    """What the runs of a recipe are typed as, but for what they begin with."""
    spec = DECLARED[recipe]
    arms = spec["arms"] | spec.get("beside", {})
    tried = [[f"{option}={value}"] for option, values in spec.get("search", {}).items() for value in values] or [[]]
    for setting, given in spec.get("settings", {"": {"words": []}}).items():
        for arm in [*spec.get("only", {}).get(setting, spec["arms"]), *spec.get("beside", {})]:
            for words in tried:
                for seed in range(spec.get("seeds", 1)):
                    yield [f"experiment={recipe}", *words, *given["words"], *arms[arm], f"seed={seed}"]


def of_recipe(recipe, name):
    """The runs of a recipe that a page trains, without what they begin with; the page's own, which go on from a model
    of it, are others."""
    begins = "begins" in DECLARED[recipe]
    return {tuple(word for word in words if not (begins and word.startswith("task.init=outputs/runs")))
            for words in full(name) if words[0] == f"experiment={recipe}"}


@pytest.mark.parametrize("recipe", DECLARED)
def test_a_page_at_full_trains_a_recipe_or_the_recipe_says_why_none_does(recipe):
    holding = [name for name in page.names() if any(words[0] == f"experiment={recipe}" for words in full(name))]
    assert bool(holding) != bool(DECLARED[recipe].get("alone")), holding


@pytest.mark.parametrize("name, recipe", [(name, given["recipe"]) for name, _, given in OF_PAGES])
def test_the_commands_of_a_page_are_the_words_of_the_recipe(name, recipe):
    """Of all arms, settings, seeds and values of a search; no page says less of a recipe than it has."""
    own = {tuple(words) for words in typed(recipe)}
    found = of_recipe(recipe, name)
    assert own <= found
    assert all(any(word.startswith("task.init=outputs/runs") for word in words) for words in found - own)


@pytest.mark.parametrize("name, size, given", OF_PAGES, ids=lambda each: each if isinstance(each, str) else "")
def test_recipes_are_of_the_full_size_and_have_no_word_of_a_page(name, size, given):
    assert size == "full" and not {*given} & {*recipe_words.OF_RECIPE}


def test_recipes_say_what_is_known_of_them():
    known = {*recipe_words.OWN, *Facts.__annotations__}
    for recipe, spec in DECLARED.items():
        assert {*spec} <= known, recipe
        for setting in spec.get("settings", {}).values():
            assert {*setting} <= {"words", "best", *Facts.__annotations__}, recipe
        assert not {*spec["arms"]} & {*spec.get("beside", {})}, recipe
        assert {arm for arms in spec.get("only", {}).values() for arm in arms} <= {*spec["arms"]}, recipe


# ---- how a page says it ----------------------------------------------------------------------------------------------

RECIPES = {"train": {"arms": {"a": ["attention=exact"], "b": ["attention=relu"]}, "beside": {"c": ["attention=elu"]}},
           "tune": {"settings": {"S": {"words": ["data=s"], "best": "f1"}, "T": {"words": ["x=1"], "best": "f1"}},
                    "only": {"T": ["a"]}, "arms": {"a": ["attention=exact"], "b": ["attention=relu"]}, "seeds": 2,
                    "beside": {"base": ["attention=exact"]}, "begins": {"a": {"train": "a"}, "b": {"train": "b"}},
                    "search": {"trainer.lr": ["1e-3", "2e-3"]}}}


@pytest.fixture
def declared(monkeypatch):
    monkeypatch.setattr(recipe_words, "declared", lambda: {"recipes": RECIPES})


def test_a_run_of_a_recipe_begins_with_the_runs_that_its_arms_name(declared):
    size = recipe_words.written_out({"runs": [{"recipe": "tune", "metrics": ["f1"], "workers": 1}]})
    assert size["starts"] == {f"train: {arm}": {"count": 1, "stages": [["experiment=train", *words]]}
                              for arm, words in RECIPES["train"]["arms"].items()}
    first, second, third = size["runs"]
    assert [[*each["arms"]] for each in size["runs"]] == [["a"], ["b"], ["base"]]
    assert first["before"] == {"task.init": "train: a"} and "before" not in third
    assert first["only"] == {} and second["only"] == {"T": []} and first["seeds"] == 2 and first["workers"] == 1
    assert first["best"] == {"S": "f1", "T": "f1"}
    models = training.last(size["starts"], SOURCES)
    grid = training.Grid.read(first, models)
    assert [trial.options("S", "a", 1) for trial in grid.trials()] == [
        ["experiment=tune", f"trainer.lr={rate}", "data=s", "attention=exact",
         f"task.init={training.folder(models['train: a'][0])}", "seed=1"] for rate in ("1e-3", "2e-3")]


def test_a_page_chooses_settings_and_arms(declared):
    size = recipe_words.written_out({"runs": [{"recipe": "tune", "metrics": ["f1"], "settings": ["T"], "arms": ["a"]}]})
    assert [([*each["arms"]], [*each["settings"]]) for each in size["runs"]] == [(["a"], ["T"])]
    assert [*size["starts"]] == ["train: a"]


def test_a_start_is_a_run_of_a_recipe_with_those_before_it(declared):
    given = {"recipe": "tune", "setting": "T", "arm": "a", "count": 1}
    size = recipe_words.written_out({"starts": {"the model": given}})
    assert size["starts"] == {"the model": {"count": 1, "stages": [
        ["experiment=train", "attention=exact"], ["experiment=tune", "x=1", "attention=exact"]]}}


@pytest.mark.parametrize("given, message", [
    ({"recipe": "tuna"}, "unknown recipe 'tuna'.*did you mean tune"),
    ({"recipe": "tune", "arms": ["bass"]}, "unknown arm of the recipe tune 'bass'"),
    ({"recipe": "tune", "settings": ["U"]}, "unknown setting of the recipe tune 'U'"),
    ({"recipe": "tune", "seeds": 9}, "seeds stands in conf/recipes.yaml")], ids=str)
def test_what_is_no_run_of_a_recipe(declared, given, message):
    with pytest.raises(ConfigError, match=message):
        recipe_words.written_out({"runs": [given]})


def test_a_start_of_an_arm_that_is_none(declared):
    with pytest.raises(ConfigError, match="unknown arm of the recipe train"):
        recipe_words.written_out({"starts": {"x": {"recipe": "train", "arm": "d"}}})
