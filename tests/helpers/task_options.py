"""Options of tasks: those of conf/task, and those of small runs of every trained task.

DATA stands for the folder of their data.
"""

from omegaconf import OmegaConf

from crt_exp.experiments.runner.command_line import compose
from crt_exp.experiments.runner.configuration import plain_config
from crt_exp.registry import CONF, construct


def options_of(name):
    """Options of conf/task/<name>.yaml, as arguments of the task."""
    node = OmegaConf.load(CONF / "task" / f"{name}.yaml")
    options = OmegaConf.to_container(node.get("task", node), resolve=True)
    return {key: value for key, value in options.items() if not key.startswith("_")}


def composed_task(words):
    """The task of a command line."""
    return construct(plain_config(compose(words))["task"])


ENCODER = [
    "task.sizes.hidden_size=32",
    "task.sizes.num_hidden_layers=2",
    "task.sizes.num_attention_heads=2",
    "task.sizes.intermediate_size=48",
]
SEQUENCE = [
    "+task.sizes.heads=2",
    "+task.sizes.layers=1",
    "+task.sizes.d_ff=32",
    "+task.sizes.d=16",
]
IMAGE = [
    "task.size=12",
    "task.sizes.patch=4",
    "task.sizes.width=32",
    "task.sizes.depth=2",
    "task.sizes.heads=2",
    "task.workers=0",
]
RECOGNISER = {
    "mels": 16,
    "channels": 4,
    "layers": 1,
    "dim": 16,
    "ffn": 32,
    "heads": 2,
    "kernel": 7,
    "predictor": 16,
    "joiner": 16,
}
SPEECH = [f"+task.sizes.{key}={value}" for key, value in RECOGNISER.items()]
RULES = ["+task.rules.train=60", "+task.rules.validation=20", "+task.rules.test=20"]
GENERATED = {
    "sequences": 200,
    "families": 2,
    "held_out": 1,
    "shortest": 10,
    "longest": 16,
    "nearest": 2,
    "farthest": 4,
    "copied": 0.6,
}
FAMILIES = [f"task.generated.{key}={value}" for key, value in GENERATED.items()]
TASKS = {
    "mlm": [
        "task=mlm",
        "task.text=DATA/text.txt",
        "task.vocabulary_size=150",
        "task.block=16",
        "task.cache_dir=null",
        *ENCODER,
    ],
    "causal": [
        "task=mlm",
        "task.causal=true",
        "task.text=DATA/text.txt",
        "task.vocabulary_size=300",
        "task.block=16",
        "task.cache_dir=null",
        *ENCODER,
    ],
    "glue": [
        "task=glue",
        "task.dataset=mnli",
        "task.data_dir=DATA/MNLI",
        "task.model=DATA/bert",
        "task.max_length=40",
    ],
    "ptb": [
        "task=ptb",
        "task.corpus=DATA/words.txt",
        "task.width=16",
        "task.bptt=7",
        "task.softmax=features",
        "task.sampling.negatives=5",
        "task.sampling.rebuild_every=3",
        "task.eval_columns=4",
    ],
    "books": [
        "task=books",
        "task.text=DATA/words.txt",
        "task.vocabulary_size=270",
        "task.max_length=16",
        "task.cache_dir=null",
        *SEQUENCE,
    ],
    "trembl": [
        "task=trembl",
        "task.max_length=16",
        "task.validation_share=0.1",
        "task.test_share=0.1",
        "task.cache_dir=null",
        *FAMILIES,
        *SEQUENCE,
    ],
    "pixels": ["task=pixels", "task.evaluated=10", *SEQUENCE],
    "recall": [
        "task=recall",
        "task.block=16",
        "task.pairs=2",
        "task.symbols=8",
        "task.evaluated=8",
        "task.rows=64",
        *SEQUENCE,
    ],
    "lra": ["task=lra", "task.cache_dir=null", *RULES, *SEQUENCE],
    "imagenet": ["task=imagenet", "task.data_dir=DATA/images", *IMAGE],
    "mae": [
        "task=mae",
        "task.data_dir=DATA/images",
        "task.sizes.decoder_width=16",
        "task.sizes.decoder_depth=1",
        "task.sizes.decoder_heads=2",
        *IMAGE,
    ],
    "librispeech": [
        "task=librispeech",
        "task.corpus=fsdd",
        "task.data_dir=DATA/digits",
        "task.strings.train=24",
        "task.strings.validation=6",
        "task.strings.test=9",
        "task.batch_seconds=12",
        "task.workers=0",
        *SPEECH,
    ],
}
SHORT = [
    "attention=favorpp",
    "features.m=8",
    "trainer.steps=6",
    "trainer.save_every=4",
    "trainer.log_every=1",
    "trainer.batch=8",
    "logger=none",
]
