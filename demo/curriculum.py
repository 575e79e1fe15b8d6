"""The curriculum: conversations whose last answer follows from what stands before it.

Each family has one function that draws a `Task`: the user's text, the right answer, a worked thought for when reasoning is
on, and a key that names the content (not the wording). A task is held out when the SHA-256 of its key starts with a byte
below `HELD_OUT_BYTES`; training never sees such content, whatever the wording, system message or reasoning mode.

Run as a program it writes `heldout.jsonl`. `train.py` draws from `conversation`.
"""

import hashlib
import json
import random
import sys
from dataclasses import dataclass, field

import tools as t
import words as w

HELD_OUT_BYTES = 13  # of 256: about 5 % of all content

IDENTITY = "I am Lily's demo model, a tiny demo of the Qwen3.6 architecture with about twenty million parameters."


def held_out(key):
    """Whether content with this key belongs to the held-out split."""
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_BYTES


@dataclass
class Task:
    """One exchange: `ask` and `answer` are texts, `think` the reasoning shown when it is on, `key` names the content."""

    ask: str
    answer: str
    think: str
    key: str


@dataclass
class Conversation:
    """What the model sees and must say; `messages` ends with the answer."""

    family: str
    messages: list
    tools: list = None
    thinking: bool = False
    keys: list = field(default_factory=list)


def _integer(r, digits=None):
    digits = digits or r.choice([1, 2, 2, 3, 3, 3])
    return r.randint(10 ** (digits - 1) if digits > 1 else 0, 10 ** digits - 1)


def add_steps(a, b):
    """Column addition in words."""
    steps, carry, place = [], 0, 0
    for name in ("ones", "tens", "hundreds"):
        if place and not (a // 10 ** place or b // 10 ** place):
            break
        x, y = a // 10 ** place % 10, b // 10 ** place % 10
        total = x + y + carry
        steps.append(f"{name}: {x} + {y}" + (" + 1" if carry else "") + f" = {total}")
        carry, place = total // 10, place + 1
    return f"{a} + {b}, " + ", ".join(steps) + f". So {a + b}."


def subtract_steps(a, b):
    """Column subtraction in words; the smaller is taken from the larger."""
    big, small = max(a, b), min(a, b)
    steps, borrow, place = [], 0, 0
    for name in ("ones", "tens", "hundreds"):
        if place and not big // 10 ** place:
            break
        x, y = big // 10 ** place % 10, small // 10 ** place % 10
        low = x - y - borrow
        steps.append(f"{name}: {x} - {y}" + (" - 1" if borrow else "") + f" = {low % 10}")
        borrow, place = int(low < 0), place + 1
    sign = f"{a} is less than {b}, so the result is negative. " if a < b else ""
    return f"{sign}{big} - {small}, " + ", ".join(steps) + f". So {a - b}."


def _typed(r, text):
    """The text as people type it: now and then without the capital or the last mark."""
    if r.random() < 0.12:
        text = text[0].lower() + text[1:]
    return text[:-1] if r.random() < 0.08 and text[-1] in ".?!" else text


def sum_task(r):
    a, b = _integer(r), _integer(r)
    ask = r.choice(["What is {a} + {b}?", "What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "Add {a} and {b}.", "{a} + {b}", "{a} + {b} =",
                    "{a}+{b}", "Compute {a} + {b}.", "Calculate {a} + {b}.", "How much is {a} + {b}?", "How much is {a} plus {b}?",
                    "What is the sum of {a} and {b}?", "Please add {a} and {b}."]).format(a=a, b=b)
    return Task(_typed(r, ask), str(a + b), add_steps(a, b), f"sum {a} {b}")


def difference_task(r):
    a, b = _integer(r), _integer(r)
    if a < b and r.random() < 0.7:
        a, b = b, a
    ask = r.choice(["What is {a} - {b}?", "What is {a} - {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "Subtract {b} from {a}.", "{a} - {b}", "{a} - {b} =",
                    "{a}-{b}", "Compute {a} - {b}.", "Calculate {a} - {b}.", "How much is {a} - {b}?", "How much is {a} minus {b}?",
                    "What is the difference of {a} and {b}?", "Take {b} away from {a}."]).format(a=a, b=b)
    return Task(_typed(r, ask), str(a - b), subtract_steps(a, b), f"difference {a} {b}")


def _pseudo_word(r):
    word = "".join(r.choice(w.SYLLABLES) for _ in range(r.randint(1, 4)))
    style = r.random()
    if style < 0.15:
        return word.title()
    if style < 0.22:
        return word.upper()
    if style < 0.3:
        return "".join(r.choice("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_/.") for _ in range(r.randint(1, 5)))
    return word


def _items(r, low, high):
    n = r.randint(low, high)
    kind = r.random()
    if kind < 0.6:
        return [r.choice(w.WORDS) for _ in range(n)]
    if kind < 0.75:
        return [str(_integer(r)) for _ in range(n)]
    if kind < 0.9:
        return [_pseudo_word(r) for _ in range(n)]
    return [r.choice(r.choice([w.PEOPLE, w.CITIES, w.WORDS, w.COLORS])) for _ in range(n)]


def repeat_task(r):
    items = _items(r, 2, 12)
    joined = r.choice([" ", ", "]).join(items)
    ask = r.choice(["Repeat: {}", "Repeat this: {}", "Say exactly: {}", "Copy this text: {}", "Repeat after me: {}", "Echo: {}"]).format(joined)
    return Task(ask, joined, "I repeat the text as it is.", "repeat " + " ".join(items))


def reverse_task(r):
    items = _items(r, 2, 8)
    sep = r.choice([" ", ", "])
    ask = r.choice(["Reverse the order: {}", "Reverse: {}", "Write this list backwards: {}", "Reverse this list: {}", "Say these in reverse order: {}"]).format(sep.join(items))
    return Task(ask, sep.join(items[::-1]), "I start with the last one, " + items[-1] + ", and go back to the first one, " + items[0] + ".", "reverse " + " ".join(items))


def sort_task(r):
    if r.random() < 0.6:
        n, top = r.randint(3, 7), r.choice([30, 99, 999])
        items = r.sample(range(top + 1), n)
        down = r.random() < 0.3
        right = sorted(items, reverse=down)
        if down:
            ask = r.choice(["Sort these numbers from largest to smallest: {}", "Sort in descending order: {}"])
        else:
            ask = r.choice(["Sort these numbers: {}", "Sort: {}", "Sort these numbers from smallest to largest: {}", "Sort in ascending order: {}", "Put these numbers in order: {}"])
        word = "largest" if down else "smallest"
    else:
        items = r.sample(w.WORDS, r.randint(3, 6))
        right = sorted(items)
        ask = r.choice(["Sort these words: {}", "Sort alphabetically: {}", "Sort these words in alphabetical order: {}", "Put these words in order: {}"])
        word = "first"
    items, right = [str(i) for i in items], [str(i) for i in right]
    think = f"There are {len(items)}. The {word} is {right[0]}, then " + ", then ".join(right[1:]) + "."
    return Task(ask.format(", ".join(items)), ", ".join(right), think, f"sort {word} " + " ".join(items))


def count_task(r):
    kind = r.random()
    if kind < 0.5:
        names = r.sample(w.WORDS, r.randint(2, 5))
        items = [r.choice(names) for _ in range(r.randint(3, 14))]
        target = r.choice(names)
        ask = r.choice(["How many times does {} appear in: {}", "Count the word {} in: {}", "How often does {} occur here: {}", "How many {} are in this list: {}"]).format(target, ", ".join(items))
        hits = [i == target for i in items]
    elif kind < 0.75:
        items = [r.choice(w.WORDS) for _ in range(r.randint(1, 14))]
        ask = r.choice(["How many words are in this list: {}", "Count the words: {}", "How many items are here: {}"]).format(", ".join(items))
        hits, target = [True] * len(items), "words"
    else:
        items = [str(r.randint(0, 99)) for _ in range(r.randint(3, 12))]
        target, rest = r.choice([("even", 0), ("odd", 1)])
        ask = r.choice(["How many of these numbers are {}: {}", "Count the {} numbers: {}"]).format(target, ", ".join(items))
        hits = [int(i) % 2 == rest for i in items]
    walk, n = [], 0
    for item, hit in zip(items, hits):
        n += hit
        walk.append(f"{item} ({n})" if hit else item)
    return Task(ask, str(n), "I go through the list: " + ", ".join(walk) + f". That makes {n}.", f"count {target} " + " ".join(items))


def json_task(r):
    p, q, c = [w.person(r), w.person(r)], r.randint(2, 99), r.choice(w.CITIES)
    kind = r.randrange(5)
    if kind == 0:
        job = r.choice(w.JOBS)
        text, obj = f"{p[0]} is {q} years old, lives in {c} and works as a {job}.", {"name": p[0], "age": q, "city": c, "job": job}
    elif kind == 1:
        color, thing, price = r.choice(w.COLORS), r.choice(w.OBJECTS), r.randint(1, 300)
        text, obj = f"The shop sells {q} {color} items of the kind {thing} for {price} euros each.", {"item": thing, "color": color, "count": q, "price": price}
    elif kind == 2:
        day, food = r.choice(w.DAYS), r.choice(w.FRUITS)
        text, obj = f"On {day} {p[0]} bought {q} pieces of {food} in {c}.", {"day": day, "buyer": p[0], "item": food, "count": q, "city": c}
    elif kind == 3:
        day, paid = r.choice(w.DAYS), r.random() < 0.5
        text = f"{p[0]} and {p[1]} meet in {c} on {day}, and the trip is {'paid' if paid else 'not paid'}."
        obj = {"people": p, "city": c, "day": day, "paid": paid}
    else:
        animal, color = r.choice(w.ANIMALS), r.choice(w.COLORS)
        text, obj = f"{p[0]} has a {color} {animal} called {p[1]}, which is {q % 20 + 1} years old.", {"owner": p[0], "pet": {"name": p[1], "kind": animal, "color": color, "age": q % 20 + 1}}
    ask = r.choice(["Write this as JSON: {}", "Turn this sentence into a JSON object: {}", "Give me JSON for: {}", "Extract the data as JSON: {}", "{} Answer as JSON."]).format(text)
    return Task(ask, json.dumps(obj), "The fields are " + ", ".join(obj) + ".", "json " + text)


STORIES = {
    "finds": "{n} was a {t} {a} who lived near the {p}. One morning {n} found a {o} under a tree. \"Whose {o} is this?\" asked {n}. Nobody knew, so the {a} kept it, and the {o} brought luck to everyone in the {p}. The end.",
    "loses": "Once there was a {t} {a} called {n}. {n} loved an old {o} and took it everywhere. One day the {o} was gone. {n} looked all over the {p} and cried. At last a friend brought the {o} back, and the {a} danced for joy. The end.",
    "builds": "In the {p} lived {n}, a {t} {a}. {n} wanted to build a {o}, but had no tools. So the {a} asked the neighbors for help. They worked all day, and in the evening the new {o} stood in the {p}. Everyone was proud of {n}. The end.",
    "sells": "{n} the {a} went to the {p} to sell a {o}. Nobody wanted it. Then a {t} child came and smiled at the {o}. \"Take it,\" said {n}, \"it is yours.\" The {a} went home with empty hands and a full heart. The end.",
    "steals": "A thief came to the {p} and took a {o}. {n}, a {t} {a}, saw it and ran after him. \"Stop!\" cried the {a}. The thief was afraid and dropped the {o}. From that day on {n} was the guard of the {p}. The end.",
}


def story_task(r):
    verb = r.choice(list(STORIES))
    f = dict(n=w.person(r), t=r.choice(w.TRAITS), a=r.choice(w.ANIMALS), o=r.choice(w.OBJECTS), p=r.choice(w.PLACES))
    ask = r.choice(["Tell me a story about a {t} {a} named {n} who {v} a {o} in the {p}.", "Write a short story: a {t} {a} named {n} {v} a {o} in the {p}.",
                    "I want a story about {n}, a {t} {a}, who {v} a {o} in the {p}."]).format(v=verb, **f)
    return Task(ask, STORIES[verb].format(**f), f"The hero is {f['n']}, the thing is the {f['o']}, the place is the {f['p']}.", f"story {verb} " + " ".join(f.values()))


HELLOS = ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Good morning", "Good morning!", "Good evening!", "Hello there!", "Hi there!", "Good day!"]
WHO = ["Who are you?", "What are you?", "What is this?", "Who is this?", "Tell me who you are.", "What is your name?", "Introduce yourself.", "Are you a model?", "What model are you?", "What can you tell me about yourself?"]
CAN = ["What can you do?", "How can you help me?", "What are you able to do?", "Help"]
THANKS = ["Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much!"]
BYES = ["Bye", "Bye!", "Goodbye", "Goodbye!", "See you later!"]
ABILITIES = "I can add and subtract, repeat, reverse, sort and count, find facts in a text, write JSON, tell short stories and call tools."
PINNED = {f"greeting {x}" for x in HELLOS + WHO + CAN + THANKS + BYES}  # too few to hold any out; always for training


def greeting_task(r):
    kind = r.random()
    name = w.person(r)
    if kind < 0.15:
        ask, answer = r.choice(HELLOS), f"Hello! {IDENTITY}"
    elif kind < 0.35:
        ask = r.choice(HELLOS).rstrip("!") + r.choice([", I am {}.", ", my name is {}.", ", this is {}.", "! I am {}.", "! My name is {}."]).format(name)
        answer = f"Hello, {name}! {IDENTITY}"
    elif kind < 0.55:
        ask, answer = r.choice(WHO), IDENTITY
    elif kind < 0.75:
        ask = r.choice(HELLOS).rstrip("!") + r.choice([", ", "! ", ". "]) + r.choice(["", f"I am {name}. ", f"My name is {name}. "]) + r.choice(WHO)
        answer = (f"Hello, {name}! " if name in ask else "Hello! ") + IDENTITY
    elif kind < 0.85:
        ask, answer = r.choice(CAN), ABILITIES
    elif kind < 0.95:
        ask, answer = r.choice(THANKS), "You are welcome!"
    else:
        ask, answer = r.choice(BYES), "Goodbye!"
    return Task(_typed(r, ask), answer, "This is small talk, I answer kindly.", "greeting " + ask)


FILLER = ["It rained in {c} for {n} days.", "{p} went to {c} on {d}.", "The train to {c} was {n} minutes late.", "{p} and {q} had tea in the {l}.", "Nobody in the {l} saw the {k} {a}.",
          "On {d} the {l} was closed.", "{p} bought a {k} {o}.", "A {a} slept in the {l} all day.", "There are {n} trees near the {l}.", "The {k} {o} of {p} is very old."]


def _fact(r, used):
    """A fact as (statement, question, answer, tokens about); its key pair is new in `used`."""
    while True:
        kind = r.randrange(3)
        pair = (r.choice(w.COLORS), r.choice(w.ANIMALS)) if kind < 2 else (r.choice(w.PEOPLE), r.choice(w.OBJECTS))
        if (kind, pair) not in used:
            used.add((kind, pair))
            break
    x, y = pair
    if kind == 0:
        value = str(r.randint(1000, 9999))
        return f"The code of the {x} {y} is {value}.", f"What is the code of the {x} {y}?", value, 13, f"code of the {x} {y}"
    if kind == 1:
        value = r.choice(w.CITIES)
        return f"The {x} {y} lives in {value}.", f"Where does the {x} {y} live?", value, 7, f"home of the {x} {y}"
    value = r.choice(w.PLACES)
    return f"{x} keeps the {y} in the {value}.", f"Where does {x} keep the {y}?", value, 8, f"place of the {y} of {x}"


def recall_parts(r, size):
    """A text of about `size` tokens and the facts in it as (question, answer, name)."""
    used, sentences, facts, total = set(), [], [], 0
    density = r.choice([0.1, 0.2, 0.4, 0.8]) if size > 300 else r.choice([0.4, 0.8, 1.0])
    while total < size:
        if (r.random() < density and len(used) < 900) or not facts:
            statement, question, answer, cost, name = _fact(r, used)
            facts.append((question, answer, name))
        else:
            p, q = r.sample(w.PEOPLE, 2)
            statement = r.choice(FILLER).format(c=r.choice(w.CITIES), n=r.randint(2, 60), p=p, q=q, d=r.choice(w.DAYS), l=r.choice(w.PLACES), k=r.choice(w.COLORS), a=r.choice(w.ANIMALS), o=r.choice(w.OBJECTS))
            cost = 9
        sentences.append(statement)
        total += cost
    return " ".join(sentences), facts


RECALL_INTRO = ["Read this text: {}", "Here are some notes: {}", "{}", "Remember these facts: {}", "Text: {}"]


def recall_conversation(r, size, questions):
    """A recall task: the text in the user's or the system's message, then one or more questions."""
    text, facts = recall_parts(r, size)
    asked = r.sample(facts, min(questions, len(facts)))
    intro = r.choice(RECALL_INTRO).format(text)
    messages = []
    first = asked[0][0]
    if r.random() < 0.3:
        messages += [{"role": "system", "content": intro}, {"role": "user", "content": first}]
    else:
        if r.random() < 0.3:
            messages.append(system_message(r))
        messages.append({"role": "user", "content": intro + r.choice(["\n\n", "\n\nQuestion: ", "\n", " "]) + first})
    for i, (question, answer, name) in enumerate(asked):
        if i:
            messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": f"I look for the {name} in the text. It is {answer}."})
    return Conversation("recall", messages, keys=["recall " + text])


def system_message(r):
    text = r.choice(w.SYSTEMS).format(person=r.choice(w.PEOPLE), day=r.choice(w.DAYS), month=r.choice(w.MONTHS), city=r.choice(w.CITIES), job=r.choice(w.JOBS), number=r.randint(1, 31))
    return {"role": "system", "content": text}


SIMPLE = {"sum": sum_task, "difference": difference_task, "repeat": repeat_task, "reverse": reverse_task, "sort": sort_task,
          "count": count_task, "json": json_task, "story": story_task, "greeting": greeting_task}
CHAINED = ["sum", "difference", "repeat", "reverse", "sort", "count", "greeting"]  # short enough to follow one another
CANNOT = "I am sorry, I cannot do that here."


def draw(r, family, split):
    """A task of a simple family whose content is in `split` ("train" or "heldout")."""
    while True:
        task = SIMPLE[family](r)
        if (held_out(task.key) and task.key not in PINNED) == (split == "heldout"):
            return task


def _turn(task):
    return [{"role": "user", "content": task.ask}, {"role": "assistant", "content": task.answer, "reasoning_content": task.think}]


def _declared(r, wanted, others):
    """Up to four declared tools: one wording of each in `wanted`, then `others` other topics, shuffled."""
    pool = r.sample([x for x in t.TOOLS if x not in wanted], others)
    used, out = set(), []
    for tool in list(wanted) + pool:
        out.append(t.declare(r, tool, used))
        used.add(out[-1].name)
    chosen = out[:len(wanted)]
    r.shuffle(out)
    return chosen, [d.spec for d in out]


def _call(declared, values):
    return {"name": declared.name, "arguments": dict(zip(declared.keys, values))}


def tool_choice(r, split):
    tool = r.choice(t.TOOLS)
    ask, values = t.request(r, tool)
    (declared,), specs = _declared(r, [tool], r.randint(0, 3))
    answer = {"role": "assistant", "content": "", "tool_calls": [_call(declared, values)],
              "reasoning_content": f"The user wants {tool.wish.format(*values)}. The tool {declared.name} fits."}
    return Conversation("tool_choice", [{"role": "user", "content": ask}, answer], specs, keys=[f"tool {tool.topic} {values}"])


def no_tool(r, split):
    if r.random() < 0.6:
        _, specs = _declared(r, [], r.randint(1, 4))
        task = draw(r, r.choice(CHAINED + ["json"]), split)
        task.think = "No tool is needed. " + task.think
    else:
        tool = r.choice(t.TOOLS)
        ask, values = t.request(r, tool)
        # With no tools at all the same request gets the same answer.
        specs = [t.declare(r, x, ()).spec for x in r.sample([x for x in t.TOOLS if x is not tool], r.choice([0, 1, 2, 3, 4]))] or None
        task = Task(ask, CANNOT, f"The user wants {tool.wish.format(*values)}. No tool fits.", f"no tool {tool.topic} {values}")
    return Conversation("no_tool", _turn(task), specs, keys=[task.key])


def tool_answer(r, split):
    tool = r.choice(t.TOOLS)
    ask, values = t.request(r, tool)
    (declared,), specs = _declared(r, [tool], r.randint(0, 3))
    result, report = t.respond(r, tool, values)
    messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": "", "tool_calls": [_call(declared, values)]},
                {"role": "tool", "content": result}, {"role": "assistant", "content": report, "reasoning_content": f"The tool {declared.name} gave the result."}]
    return Conversation("tool_answer", messages, specs, keys=[f"tool answer {tool.topic} {values} {result}"])


def _memory(r):
    """A statement to remember: (statement, acknowledgement, question, answer)."""
    kind = r.randrange(4)
    if kind == 0:
        v = w.person(r)
        return r.choice(["My name is {}.", "I am {}.", "Please call me {}."]).format(v), f"Nice to meet you, {v}.", r.choice(["What is my name?", "Who am I?"]), f"Your name is {v}."
    if kind == 1:
        what, pool = r.choice([("fruit", w.FRUITS), ("color", w.COLORS), ("animal", w.ANIMALS), ("city", w.CITIES)])
        v = r.choice(pool)
        return f"My favorite {what} is {v}.", "I will remember that.", f"What is my favorite {what}?", f"Your favorite {what} is {v}."
    if kind == 2:
        n = r.randint(100, 9999)
        return r.choice(["Remember the number {}.", "Keep the number {} in mind."]).format(n), "I will remember that.", r.choice(["Which number did I tell you?", "What was the number?"]), f"The number is {n}."
    o, p = r.choice(w.OBJECTS), r.choice(w.PLACES)
    return f"I put my {o} in the {p}.", "I will remember that.", f"Where is my {o}?", f"Your {o} is in the {p}."


def multi_turn(r, split):
    kind, turns = r.random(), []
    if kind < 0.45:
        said, ok, question, answer = _memory(r)
        turns += [(said, ok)] + [(x.ask, x.answer) for x in (draw(r, r.choice(CHAINED), "train") for _ in range(r.randint(0, 4)))] + [(question, answer)]
        think = f"The user said: {said}"
    elif kind < 0.75:
        a, b = _integer(r, r.randint(1, 3)), _integer(r, r.randint(1, 3))
        value = a + b
        turns.append((r.choice(["What is {} + {}?", "Add {} and {}."]).format(a, b), str(value)))
        for _ in range(r.randint(1, 3)):
            c = _integer(r, r.randint(1, 2))
            if r.random() < 0.6 or value < c:
                think, value = add_steps(value, c), value + c
                turns.append((r.choice(["Add {} to that.", "Now add {}.", "Plus {}?"]).format(c), str(value)))
            else:
                think, value = subtract_steps(value, c), value - c
                turns.append((r.choice(["Subtract {} from that.", "Now subtract {}.", "Minus {}?"]).format(c), str(value)))
        think = "The last result counts. " + think
    else:
        items = r.sample(w.WORDS, r.randint(3, 6))
        turns.append((r.choice(["Repeat: {}", "Say exactly: {}"]).format(", ".join(items)), ", ".join(items)))
        for op in r.sample(["reverse", "sort", "count", "first", "last"], r.randint(1, 3)):
            if op == "reverse":
                items = items[::-1]
                turns.append((r.choice(["Now reverse it.", "Reverse that."]), ", ".join(items)))
            elif op == "sort":
                items = sorted(items)
                turns.append((r.choice(["Now sort it.", "Sort that."]), ", ".join(items)))
            elif op == "count":
                turns.append((r.choice(["How many words are that?", "How many words are in it?"]), str(len(items))))
            else:
                turns.append((f"What is the {op} word?", items[0 if op == "first" else -1]))
        think = "The list so far is " + ", ".join(items) + "."
    messages = []
    for ask, answer in turns:
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    messages[-1]["reasoning_content"] = think
    return Conversation("multi_turn", messages, keys=["multi " + " | ".join(a for a, _ in turns)])


COMPOSED = {"tool_choice": tool_choice, "no_tool": no_tool, "tool_answer": tool_answer, "multi_turn": multi_turn}
REASONED = ["sum", "difference", "sort", "count"]  # the families that the held-out family "thinking" draws from


def _in_split(conv, split):
    return (held_out(conv.keys[0]) and conv.keys[0] not in PINNED) == (split == "heldout")


def conversation(r, family, split="train", size=None, thinking=None):
    """Draws one conversation of `family`; `recall` needs `size`, its length in tokens."""
    while True:
        if family == "recall":
            many = 1 if split == "heldout" else r.choice([1, 2, 4, 8, 16] if size > 300 else [1, 1, 2, 3])
            conv = recall_conversation(r, size, many)
        elif family in COMPOSED:
            conv = COMPOSED[family](r, split)
        else:
            source = r.choice(REASONED) if family == "thinking" else family
            task = draw(r, source, split)
            conv = Conversation(family, _turn(task), keys=[task.key])
            if split == "train" and family in CHAINED and r.random() < 0.4:
                before = [m for _ in range(r.randint(1, 4)) for m in _turn(draw(r, r.choice(CHAINED), "train"))]
                conv.messages = before + conv.messages
        if _in_split(conv, split):
            break
    if conv.messages[0]["role"] != "system" and r.random() < 0.4:
        conv.messages = [system_message(r)] + conv.messages
    if thinking is None:
        thinking = family == "thinking" or r.random() < (0.2 if split == "train" else 0.0)
    conv.thinking = thinking
    return conv


def heldout_record(conv, family):
    """The line of `heldout.jsonl` for a conversation."""
    last = conv.messages[-1]
    messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in conv.messages[:-1]]
    for m in messages:
        if m.get("tool_calls"):
            m["tool_calls"] = [{"type": "function", "function": c} for c in m["tool_calls"]]
    out = {"family": family, "messages": messages}
    if conv.tools:
        out["tools"] = conv.tools
    out["enable_thinking"] = conv.thinking
    out["answer"] = {"tool_calls": last["tool_calls"]} if last.get("tool_calls") else {"content": last["content"]}
    return out


# Recall sizes are an estimate that is a little high: the prompts come to about 1,000, 4,000 and 7,800 tokens.
HELDOUT = [(f, f, None, 60) for f in [*SIMPLE, "thinking", *COMPOSED]] + [
    ("recall_1k", "recall", 1000, 40), ("recall_4k", "recall", 4150, 40), ("recall_8k", "recall", 8050, 40)]


def heldout(seed=20_260):
    """The held-out set, the same for every caller."""
    r = random.Random(seed)
    for name, family, size, count in HELDOUT:
        seen = set()
        while len(seen) < count:
            conv = conversation(r, family, "heldout", size)
            record = json.dumps([conv.messages[:-1], conv.tools])
            if record not in seen:
                seen.add(record)
                yield name, conv


if __name__ == "__main__":
    with open(sys.argv[1] if len(sys.argv) > 1 else "heldout.jsonl", "w") as out:
        for name, conv in heldout():
            out.write(json.dumps(heldout_record(conv, name), ensure_ascii=False) + "\n")
