"""Drawing sequences: they have the chances of the parallel pass."""

import pytest
import torch
from test_language import NAMES, calibrated

from crt_exp.infer import TokenChoice, generate

PROMPT = torch.tensor([9, 1, 4])


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_symbols_are_drawn_by_the_chances_of_the_parallel_pass(name):
    """Each is what the same number draws from the logits of the whole sequence at its place."""
    model, choice = calibrated(name), TokenChoice(0.8, top_p=0.9)
    found = generate(model, PROMPT, 20, choice, [3, 4], never=[0])
    for seed, row in zip([3, 4], found):
        whole = model(torch.cat([PROMPT, torch.tensor(row)])[None])[0, 2:-1]
        whole[:, 0] = -torch.inf
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for _ in row])
        assert len(row) == 20 and 0 not in row and choice.draw(whole, uniform).tolist() == row


@torch.no_grad()
def test_frequencies_are_the_chances():
    model = calibrated("favorpp")
    logits = model(PROMPT[None])[:, -1]
    expected = (2 * logits[0]).softmax(-1)
    drawn = [row[0] for row in generate(model, PROMPT, 1, TokenChoice(0.5), range(4000))]
    counts = torch.bincount(torch.tensor(drawn), minlength=11) / 4000
    assert ((counts - expected).abs() < 5 * (expected / 4000).sqrt()).all()


def test_a_sequence_depends_on_its_seed_alone():
    model = calibrated("exact")
    alone = generate(model, PROMPT, 10, TokenChoice(), [5])
    among = generate(model, PROMPT, 10, TokenChoice(), [1, 5, 2])
    assert among[1] == alone[0] and among[0] != among[2]


def test_the_end_ends_a_sequence():
    model = calibrated("exact")
    free, ended = (generate(model, PROMPT, 25, TokenChoice(), range(6), end=end) for end in (None, 7))
    for whole, cut in zip(free, ended):
        assert cut == whole[:whole.index(7) if 7 in whole else None]
    assert any(7 in row for row in free)


LOGITS = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


@pytest.mark.parametrize("choice, expected", [
    (TokenChoice(), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(temperature=0), [1, 0, 0, 0]),
    (TokenChoice(temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    (TokenChoice(top_k=2), [4 / 7, 3 / 7, 0, 0]),
    (TokenChoice(top_k=9), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
    (TokenChoice(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
    (TokenChoice(top_p=1e-9), [1, 0, 0, 0]),
    (TokenChoice(top_p=1.0), [0.4, 0.3, 0.2, 0.1]),
    (TokenChoice(top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0]),
], ids=str)
def test_chances(choice, expected):
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(choice.probabilities(LOGITS[:, order])[0], torch.tensor(expected).double()[order])


def test_a_symbol_without_a_chance_is_never_drawn():
    uniform = torch.tensor([0.0, 1 - 1e-16])
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    assert TokenChoice().draw(logits, uniform).tolist() == [1, 2]
