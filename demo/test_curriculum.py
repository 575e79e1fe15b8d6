"""The curriculum's promises: the two renderings agree, splits do not overlap, tokens round-trip."""

import json
import random
import sys
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import chat
import curriculum

HERE = Path(__file__).parent


def _fail(message):
    raise ValueError(message)


def _template(path):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    env.globals["raise_exception"] = _fail
    return env.from_string(path.read_text())


def _sample(seed, per_family):
    r = random.Random(seed)
    for family in [*curriculum.SIMPLE, *curriculum.COMPOSED, "thinking", "recall"]:
        for i in range(per_family):
            yield curriculum.conversation(r, family, "heldout" if i % 4 == 0 else "train", size=200)


def test_the_fast_rendering_equals_the_template():
    extra = [Path(p) for p in sys.argv[1:]]  # another template with the same wire format may be compared too
    for template in map(_template, [HERE / "checkpoint/chat_template.jinja", *extra]):
        for conv in _sample(1, 40):
            prompt = template.render(messages=conv.messages[:-1], tools=conv.tools, add_generation_prompt=True, enable_thinking=conv.thinking)
            assert chat.render(conv.messages[:-1], conv.tools, conv.thinking) == prompt
            if not conv.thinking:
                conv.messages[-1].pop("reasoning_content")
            whole = template.render(messages=conv.messages, tools=conv.tools)
            assert chat.render(conv.messages, conv.tools, conv.thinking, answer=True) + "\n" == whole


def test_pieces_tokenize_as_the_whole_prompt():
    tok = Tokenizer.from_file(str(HERE / "checkpoint/tokenizer.json"))
    for conv in _sample(2, 40):
        pieces = chat.segments(conv.messages, conv.tools, conv.thinking, answer=True)
        ids = [i for text, _ in pieces for i in tok.encode(text).ids]
        assert ids[: -len(tok.encode(pieces[-1][0]).ids)] == tok.encode("".join(t for t, _ in pieces[:-1])).ids
        assert tok.decode(ids, skip_special_tokens=False) == "".join(t for t, _ in pieces)


def test_held_out_content_is_never_trained_on():
    train = {k for c in _sample(3, 400) if not curriculum._in_split(c, "heldout") for k in c.keys}
    assert not train & {k for _, c in curriculum.heldout() for k in c.keys}


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name, "ok")
