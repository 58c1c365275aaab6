"""Options that were removed: what a command, or a file that an earlier version wrote, is told to use instead."""

from collections.abc import Iterable

from crt_exp.config import ConfigError

CONSTANT_MEMORY = "attention=window, favorpp or hedgehog, whose memory is constant"
# A key, or key=value where other values of the key stay -> what to use instead.
REMOVED = {
    "attention.preset=bounded": CONSTANT_MEMORY,
    "attention.open=0": CONSTANT_MEMORY,
    "attention.open=[]": "attention.open=N, one number for all layers",
    "attention.error": "attention.open=N, the number of retrieved keys",
    "task.budget": "attention.open=N, one number for all layers",
    "task=kernel": "RandomFeatureRidge or RandomFeatureClassifier in Python, or task=uci task.csv=FILE",
    "task=board": "task=advise, or make pretrained",
    "task.softmax=multi_index": "task.softmax=quadratic, unigram or features",
    "task.sampling.codewords": "task.softmax=quadratic, unigram or features",
    "sampler=stratified": "sampler=halton or sobol",
    "trainer.profile": "torch.profiler or py-spy",
    "trainer.sequence_parallel": "trainer=fsdp, or a smaller trainer.batch",
}


def removed(words: Iterable[str]) -> ConfigError | None:
    """The error for the first `key=value` that names a removed option."""
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        for each in ("[]",) if value.startswith("[") else value.split(","):
            for name in (key, f"{key}={each}"):
                if name in REMOVED and each not in ("null", "None"):
                    return ConfigError(f"{key}={value}: removed; use {REMOVED[name]}")
    return None
