"""Endless training batches: worker processes draw conversations and pack them end to end into rows of fixed length.

Families get a share of the tokens, not of the conversations. Recall grows longer as `level` goes from 0 to 1.
"""

import math
import multiprocessing as mp
import os
import random

import numpy as np
from tokenizers import Tokenizer

import chat
import curriculum

SHARES = {"sum": 9, "difference": 9, "repeat": 4, "reverse": 4, "sort": 7, "count": 8, "json": 4, "story": 4, "greeting": 2, "thinking": 6,
          "tool_choice": 7, "no_tool": 6, "tool_answer": 5, "multi_turn": 8, "recall_short": 7, "recall_mid": 7, "recall_long": 9}
FAMILIES = list(SHARES)
RECALL = {"recall_short": (60, 400), "recall_mid": (400, 2000), "recall_long": (2000, 8100)}
GROWTH = [(0.0, 200), (0.08, 400), (0.16, 1000), (0.25, 2000), (0.4, 4200), (0.55, 8100)]  # level reached -> longest recall text


class Encoder:
    """Conversations to token ids and learnt spans."""

    def __init__(self, folder):
        self.tok = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.pad = self.tok.token_to_id("<|endoftext|>")

    def encode(self, conv):
        """Ids and the spans [(start, end)] that the model writes; the last span is the answer."""
        ids, spans = [], []
        for text, ours in chat.segments(conv.messages, conv.tools, conv.thinking, answer=True):
            piece = self.tok.encode(text).ids
            if ours:
                spans.append((len(ids), len(ids) + len(piece)))
            ids += piece
        return ids, spans


class Row:
    """One packed row: token ids, document borders, and the learnt positions with target weights and family numbers."""

    def __init__(self, size, pad):
        self.size, self.pad = size, pad
        self.ids, self.borders, self.at, self.weight, self.family, self.item = [], [0], [], [], [], []

    def room(self):
        return self.size - len(self.ids)

    def add(self, ids, spans, family, item=0):
        for a, b in spans:
            self.at += range(len(self.ids) + a, len(self.ids) + b)
            self.weight += [1 / math.sqrt(b - a)] * (b - a)  # long answers do not drown short ones
            self.family += [family] * (b - a)
            self.item += [item] * (b - a)
        self.ids += ids
        self.borders.append(len(self.ids))

    def arrays(self):
        ids = np.full(self.size, self.pad, np.int64)
        ids[:len(self.ids)] = self.ids
        borders = self.borders + ([self.size] if self.borders[-1] < self.size else [])
        position = np.concatenate([np.arange(b - a) for a, b in zip(borders, borders[1:])])
        return (ids.astype(np.int16), position.astype(np.int16), borders, np.array(self.at, np.int32), np.array(self.weight, np.float32),
                np.array(self.family, np.uint8), np.array(self.item, np.int32))


def train_conversation(r, family, longest):
    """A training conversation; `longest` bounds recall texts."""
    if family in RECALL:
        low, high = RECALL[family]
        high = min(high, longest)
        return curriculum.conversation(r, "recall", size=int(math.exp(r.uniform(math.log(low), math.log(high)))))
    return curriculum.conversation(r, family)


def _work(queue, level, folder, size, seed, shares):
    r, enc = random.Random(seed), Encoder(folder)
    spent = dict.fromkeys(FAMILIES, 0.0)
    held = None
    while True:
        longest = [n for at, n in GROWTH if level.value >= at][-1]
        row = Row(size, enc.pad)
        while row.room() > 40:
            if held is None:
                open_ = [f for f in FAMILIES if f not in RECALL or RECALL[f][0] < longest]
                f = min(open_, key=lambda f: spent[f] / shares[f] + r.random() * 200)
                ids, spans = enc.encode(train_conversation(r, f, longest))
                spent[f] += len(ids)
                held = (ids, spans, FAMILIES.index(f))
            if len(held[0]) > row.room():
                if row.room() > 600:  # a long one: keep it for the next row and fill up with short ones
                    ids, spans = enc.encode(train_conversation(r, r.choice(["sum", "difference", "sort", "count"]), longest))
                    row.add(ids, spans, 0)
                    continue
                break
            row.add(*held)
            held = None
        due = min(spent[f] / shares[f] for f in open_)
        for f in set(FAMILIES) - set(open_):  # a family that opens late does not catch up on what it missed
            spent[f] = due * shares[f]
        queue.put(row.arrays())


class Stream:
    """Batches from `workers` processes. `level` may be raised while it runs."""

    def __init__(self, folder, size, workers, seed, shares):
        context = mp.get_context("fork")
        self.queue, self.level = context.Queue(maxsize=4 * workers), context.Value("d", 0.0)
        self.processes = [context.Process(target=_work, args=(self.queue, self.level, folder, size, seed * 1000 + i, shares), daemon=True) for i in range(workers)]
        for p in self.processes:
            p.start()

    def __next__(self):
        return self.queue.get()

    def close(self):
        for p in self.processes:
            p.terminate()


def heldout_rows(folder, size, limit=None):
    """The held-out set packed into rows, the answers' positions only, and the names by item number."""
    enc, names, rows = Encoder(folder), [], []
    row = Row(size, enc.pad)
    for i, (name, conv) in enumerate(curriculum.heldout()):
        if limit and i % limit:
            continue
        ids, spans = enc.encode(conv)
        if len(ids) > size:
            continue
        if len(ids) > row.room():
            rows.append(row.arrays())
            row = Row(size, enc.pad)
        row.add(ids, spans[-1:], 0, len(names))
        names.append(name)
    return rows + [row.arrays()], names
