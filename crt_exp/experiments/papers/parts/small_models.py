"""Options of small models that pages pretrain on WikiText-2 with exact attention."""

WIKITEXT2 = "${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens"
LETTERS = f"task.text={WIKITEXT2} task.validation_text=outputs/texts/validation-48.tokens"
PIECES = f"task.text={WIKITEXT2} task.validation_text=outputs/texts/validation-16.tokens"


def masked_model(layers: int, heads: int) -> str:
    """Options of a model of width 128 that task=mlm trains with exact attention."""
    return (
        f"task=mlm attention=exact task.sizes.hidden_size=128 task.sizes.num_hidden_layers={layers} "
        f"task.sizes.num_attention_heads={heads} task.sizes.intermediate_size=512 trainer.select=last "
        "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=100"
    )


def dropout(probability: float) -> str:
    return (
        f"+task.sizes.hidden_dropout_prob={probability} "
        f"+task.sizes.attention_probs_dropout_prob={probability}"
    )


def stage(batch: int, steps: int, rate: str) -> str:
    """Options of a stage of training: rows per batch, steps, learning rate."""
    return f"trainer.batch={batch} trainer.steps={steps} trainer.lr={rate}"
