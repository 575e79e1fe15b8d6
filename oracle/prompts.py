"""Held-out curriculum text as token ids: what the golden files are computed on.

The conversations are those of `demo/heldout.jsonl`, drawn again by `demo/curriculum.py` because the file leaves
out the reasoning, which a teacher-forced model must see. They are rendered by `demo/chat.py`, which `demo/`
holds equal to the checkpoint's chat template.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


@dataclass
class Document:
    """A conversation with its last answer; `answer_mask` marks the tokens that a model would write."""

    family: str
    tokens: list
    answer_mask: np.ndarray


class HeldOut:
    """The held-out split of the curriculum in the folder `demo`, tokenized for the checkpoint inside it."""

    def __init__(self, demo):
        sys.path.insert(0, str(Path(demo).resolve()))
        import chat
        import curriculum

        self.chat = chat
        self.tokenizer = Tokenizer.from_file(str(Path(demo) / "checkpoint" / "tokenizer.json"))
        # One of each family in turn, so that any beginning of the list covers them all.
        by_family = {}
        for family, conversation in curriculum.heldout():
            by_family.setdefault(family, []).append(conversation)
        most = max(map(len, by_family.values()))
        self.conversations = [
            (family, members[turn]) for turn in range(most) for family, members in by_family.items() if turn < len(members)
        ]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    def document(self, family, conversation):
        segments = self.chat.segments(conversation.messages, conversation.tools, conversation.thinking, answer=True)
        written = np.concatenate([np.full(len(text), by_model) for text, by_model in segments])
        encoding = self.encode("".join(text for text, _ in segments))
        mask = np.array([written[start] for start, _ in encoding.offsets])
        return Document(family, encoding.ids, mask)

    def documents(self, answer_positions, longest):
        """Conversations of at most `longest` tokens until their answers hold `answer_positions` tokens."""
        documents, found = [], 0
        for family, conversation in self.conversations:
            document = self.document(family, conversation)
            if len(document.tokens) <= longest:
                documents.append(document)
                found += int(document.answer_mask.sum())
            if found >= answer_positions:
                return documents
        raise SystemExit(f"the held-out split has only {found} answer tokens in conversations of {longest} tokens")

    def stream(self, count):
        """`count` tokens of conversations one after the other, families as they come."""
        tokens = []
        for family, conversation in self.conversations:
            tokens += self.document(family, conversation).tokens
            if len(tokens) >= count:
                return tokens[:count]
        raise SystemExit(f"the held-out split has only {len(tokens)} tokens")

    def questions(self, longest):
        """(family, prompt) of every conversation, cut before its last answer, of at most `longest` tokens."""
        for family, conversation in self.conversations:
            text = self.chat.render(conversation.messages[:-1], conversation.tools, conversation.thinking)
            tokens = self.encode(text).ids
            if len(tokens) <= longest:
                yield family, tokens
