"""Trains the demo's tokenizer on the curriculum and writes tokenizer.json and tokenizer_config.json into a folder.

Byte-level BPE with Qwen's splitting rule (single digits, NFC) and exactly 4,096 entries, the special tokens at the end. The
curriculum's words need fewer entries than that, so random strings of letters, digits and marks fill the rest: any text can
be written, and pieces of unknown words are tokens the model has met.
"""

import json
import random
import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import chat
import curriculum

VOCAB = 4096
SEED = 7
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]  # plain text when decoded


def corpus(r):
    """Conversations of every family, then random strings of ever lower weight in the merges."""
    families = [*curriculum.SIMPLE, *curriculum.COMPOSED]
    for _ in range(30_000):
        conv = curriculum.conversation(r, r.choice(families))
        text = chat.render(conv.messages, None, conv.thinking, answer=True)
        yield from re.split("|".join(map(re.escape, CONTROL + MARKERS)), text)
        if conv.tools:
            yield chat.render([{"role": "user", "content": ""}], conv.tools, False).split("\n</tools>")[0]
    yield chat.TOOLS_TAIL
    for _ in range(2_000):
        yield curriculum.recall_conversation(r, 300, 1).messages[0]["content"]
    letters = "eeeetttaaooinshrdlucmfwypvbgkqjxz"
    for _ in range(20_000):
        yield " " + "".join(r.choice(letters) for _ in range(r.randint(2, 4)))


def build():
    """The trained tokenizer."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    added = len(CONTROL) + len(MARKERS)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(corpus(random.Random(SEED)), trainer)
    tok.add_tokens([AddedToken(x, special=True, normalized=False) for x in CONTROL] + [AddedToken(x, special=False, normalized=False) for x in MARKERS])
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    return tok


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    tok = build()
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False, "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace", "model_max_length": 32768,
        "split_special_tokens": False, "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(tok.token_to_id(x)): {"content": x, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": x in CONTROL} for x in CONTROL + MARKERS},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
