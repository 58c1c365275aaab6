"""Mistakes on the command line: each error names what to type."""

import pytest

from crt_exp.experiments.runner.command_line import check_command_line
from crt_exp.registry import ConfigError

MISTAKES = {
    # a key without its prefix, or with that of another group
    "task=uci m=64": "unknown key 'm'; did you mean features.m?",
    "-m task=uci m=64,128": "unknown key 'm'; did you mean features.m?",
    "task=uci dataset=wine": "unknown key 'dataset'; did you mean task.dataset?",
    "rank=3": "unknown key 'rank'; did you mean trainer.lora.rank?",
    "task=uci task.lr=0.1": "task=uci: does not use task.lr; did you mean trainer.lr?",
    "trainer.seed=1": "unknown key 'trainer.seed'; did you mean seed?",
    "heavy=3": "unknown key 'heavy'; attention.heavy needs attention=nearfar",
    # a choice of another group
    "features=nearfar": "unknown features 'nearfar'; nearfar is an attention: attention=nearfar",
    "attention=iid": "unknown attention 'iid'; iid is a sampler: sampler=iid",
    "sampler=oprf": "unknown sampler 'oprf'; oprf is a feature map: features=oprf",
    "task=imagenette": "unknown task 'imagenette'; imagenette is an experiment: "
    "experiment=imagenette",
    "features=favor++": "favor++ is an attention: attention=favor++",
    # a prefix of several choices, or of one
    "task=swap": "unknown task 'swap'; did you mean swap_copying, swap_embeddings, swap_images, "
    "swap_loss or swap_text?",
    "experiment=hrf_con": "did you mean hrf_conformer_960h?",
    "task=libri": "unknown task 'libri'; did you mean librispeech?",
    # an option of another choice of the group
    "attention=favorpp attention.block=32": "attention=favorpp: does not use attention.block; "
    "attention=nearfar or window does",
    "-m attention=favorpp attention.block=32,64": "attention=favorpp: does not use attention.block",
    "attention.block=32": "attention: none is chosen, add attention=nearfar or window",
    "features=trig features.A=0.1": "features=trig: does not use features.A; features=gerf or oprf does",
    "task=uci task.parts=2": "task=uci: does not use task.parts; task=glue does",
    # a misspelt key keeps the nearest one
    "attention=nearfar attention.blok=3": "unknown key 'attention.blok'; did you mean "
    "attention.block?",
    "hydra.dir=x": "unknown key 'hydra.dir'; did you mean hydra.run?",
}


@pytest.mark.parametrize("args, message", MISTAKES.items(), ids=map(ascii, MISTAKES))
def test_a_mistake_is_answered_with_what_to_type(args, message):
    with pytest.raises(ConfigError) as actual:
        check_command_line(args.split())
    assert message in str(actual.value)
    assert "\n" not in str(actual.value)
