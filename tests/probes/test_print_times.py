"""The commands that print times: a line or a cell for each method, at tiny lengths."""

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import BertTokenizerFast, LlamaConfig, LlamaForCausalLM

from crt_exp.probes import print_times


def test_near_far_attention_has_a_line_for_each_method(capsys, monkeypatch, one_thread):
    monkeypatch.setattr("crt_exp.probes.speed.peers", lambda length: {})
    print_times.command_line(["nearfar", "--lengths", "8", "--turns", "1", "--causal", "--forward", "--half",
                              "--without", "favorpp", "--threads", "1"])
    said = capsys.readouterr().out
    assert "nearfar causal, bfloat16" in said and "ratio to nearfar causal" in said and "favorpp" not in said
    assert "forward, L = 8, 1 turns" in said and "1 threads" in said


def test_memory_is_of_a_process_each(capsys, monkeypatch, one_thread):
    asked = []
    monkeypatch.setattr(print_times, "in_new_process", lambda call, **given: asked.append(given) or {"mib": 3.0})
    print_times.command_line(["nearfar", "memory", "--lengths", "64", "--threads", "1"])
    assert [(given["arm"], given["length"]) for given in asked] == [("nearfar", 64), ("favorpp", 64)]
    assert "nearfar" in (said := capsys.readouterr().out) and "3 MiB" in said


@pytest.mark.slow
def test_tokens_prompts_and_caches_have_a_table_each(capsys, monkeypatch, one_thread):
    monkeypatch.setattr(print_times, "PROMPT_TURNS", 1)
    print_times.command_line(["decoding", "16", "--turns", "1", "--threads", "1"])
    said = capsys.readouterr().out
    assert [line.split(";")[0] for line in said.splitlines() if "threads" in line] == [
        "ms a token", "ms of the prompt", "MiB of the cache"]
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith("| 16")]
    assert [len(row) for row in rows] == 3 * [5] and "(1.00, 1.00)" in rows[0][-1]


def test_a_model_of_ones_own_has_the_place_of_the_llama(tmp_path, one_thread):
    small = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=300,
                                         num_key_value_heads=1, intermediate_size=32))
    small.save_pretrained(tmp_path)
    BertTokenizerFast(vocab={"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}).save_pretrained(tmp_path)
    made = print_times.models(64, str(tmp_path))
    assert {each.model.config.vocab_size for each in made.values()} == {300}
    assert print_times.parser().parse_args(["decoding", "64", "--model", str(tmp_path)]).model == str(tmp_path)


class Llama:
    """As llama_cpp's: it counts what it has read."""

    def __init__(self, file, n_ctx, n_threads, **options):
        self.given, self.read = (file, n_ctx, n_threads, options), 0

    def reset(self):
        self.read = 0

    def eval(self, tokens):
        self.read += len(tokens)


def test_llama_cpp_reads_the_same_prompt(monkeypatch, one_thread):
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    made = print_times.LlamaCpp("m.gguf", 64)
    for _ in range(2):
        made.read(torch.zeros(1, 16, dtype=torch.long))
        made.token()
    assert made.model.read == 17 and made.model.given[:3] == ("m.gguf", 64, 1) and made.model.given[3]["flash_attn"]
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SystemExit, match="pip install llama-cpp-python"):
        print_times.LlamaCpp("m.gguf", 64)


def test_it_asks_what_to_print(capsys):
    with pytest.raises(SystemExit):
        print_times.command_line([])
    assert "nearfar,decoding" in capsys.readouterr().err
