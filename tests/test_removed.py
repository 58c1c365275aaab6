"""Options that were removed: one line with what to use instead, from the command line, Python and saved models."""

import json

import pytest
import swap_models
import transformers
from refusals import check_refused

from crt_exp import from_pretrained, swap_attention
from crt_exp.config import ConfigError
from crt_exp.mechanism import Mechanism
from crt_exp.removed import REMOVED

VALUES = {"attention.error": "0.1", "attention.open=[]": "attention.open=[1,2]", "task.budget": "8",
          "task.sampling.codewords": "8", "trainer.sequence_parallel": "2", "trainer.profile": "true"}
GROUPS = {"attention": ["task=mlm", "attention=nearfar"], "task.softmax": ["task=ptb"], "task.sampling": ["task=ptb"],
          "task.budget": ["task=transfer", "attention=nearfar"], "trainer": ["task=mlm", "attention=exact"]}


@pytest.mark.parametrize("name", REMOVED)
def test_a_command_is_refused_with_what_to_use(name, typed, tmp_path):
    word = name if name not in VALUES else VALUES[name] if "=" in VALUES[name] else f"{name}={VALUES[name]}"
    others = next((words for group, words in GROUPS.items() if name.startswith(group)), [])
    check_refused(typed(*others, word, "logger=none", f"hydra.run.dir={tmp_path / 'run'}"),
                  [f"{word}: removed; use {REMOVED[name]}"], tmp_path / "run")


@pytest.mark.parametrize("options", [{"preset": "bounded"}, {"error": 0.1}, {"open": 0}, {"open": [8, 16]}], ids=str)
def test_python_is_refused_with_what_to_use(options):
    with pytest.raises(ConfigError, match="removed; use attention"):
        Mechanism.of("nearfar", **options)


@pytest.mark.parametrize("change, message", [
    ({"preset": "bounded"}, "attention.preset=bounded: removed; use"), ({"open": 0}, "attention.open=0: removed; use"),
    ({"error": 0.1}, "attention.error=0.1: removed; use"), ({"error": None}, None)], ids=str)
def test_a_saved_model_is_loaded_or_refused_with_what_to_use(change, message, tmp_path):
    model = swap_attention(swap_models.made(swap_models.llama), "nearfar")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["crt_exp"]["mechanisms"][0]["options"] |= change
    config["crt_exp"]["open"] = {path: 96 for path in config["crt_exp"]["layers"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = lambda: from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    if message is None:
        assert load() is not None
        return
    with pytest.raises(ConfigError, match=message.replace(".", "[.]")):
        load()


def test_a_budget_of_keys_in_a_saved_model_is_refused(tmp_path):
    swap_attention(swap_models.made(swap_models.llama), "nearfar").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["crt_exp"]["open"] = dict.fromkeys(config["crt_exp"]["layers"], 24)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="budget of retrieved keys, which was removed"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)
