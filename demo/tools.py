"""The tools that the demo curriculum declares: how they are described, asked for, called and answered.

`declare` draws one wording of a tool (function name, description and parameter names vary, so a model has to read the
declaration), `request` a user's sentence with the arguments it asks for, `respond` a result with the sentence that reports it.
"""

import json
from dataclasses import dataclass
from typing import Callable

import words as w


@dataclass
class Param:
    """One parameter: its possible names, its JSON type, its description and how a value is drawn."""

    names: list
    type: str
    about: str
    draw: Callable


@dataclass
class Tool:
    """One thing that can be done: wordings for the declaration, for requests, and for reports of a result."""

    topic: str
    names: list
    about: list
    params: list
    requests: list
    wish: str
    result: Callable
    reports: list


def _people(r):
    return w.person(r)


def _city(r):
    return r.choice(w.CITIES)


def _number(low, high):
    return lambda r: r.randint(low, high)


def _phrase(r):
    return " ".join(r.choice(w.WORDS) for _ in range(r.randint(1, 4)))


def _path(r):
    return f"{r.choice(['docs', 'notes', 'src', 'data', 'home'])}/{r.choice(w.WORDS)}.{r.choice(['txt', 'md', 'py', 'csv'])}"


TOOLS = [
    Tool("weather", ["get_weather", "weather", "weather_lookup"],
         ["Get the current weather of a city.", "Look up the weather in a city."],
         [Param(["city", "location", "place"], "string", "The name of the city", _city)],
         ["What is the weather in {0}?", "How is the weather in {0} today?", "Tell me the weather in {0}.", "Is it raining in {0}?"],
         "the weather in {0}",
         lambda r, a: {"temperature": r.randint(0, 39), "sky": r.choice(w.SKIES)},
         ["It is {temperature} degrees and {sky} in {0}."]),
    Tool("time", ["get_time", "clock", "local_time"],
         ["Get the local time of a city.", "Tell what time it is in a city."],
         [Param(["city", "location", "zone"], "string", "The name of the city", _city)],
         ["What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0} now?"],
         "the time in {0}",
         lambda r, a: {"time": f"{r.randint(10, 23)}:{r.randint(10, 59)}"},
         ["It is {time} in {0}."]),
    Tool("message", ["send_message", "message", "write_to"],
         ["Send a message to a person.", "Send a short text to someone."],
         [Param(["to", "recipient", "person"], "string", "Who gets the message", _people),
          Param(["text", "message", "body"], "string", "The text to send", _phrase)],
         ["Send {0} the message: {1}", "Tell {0}: {1}", "Write to {0}: {1}"],
         "a message to {0}",
         lambda r, a: {"status": r.choice(["sent", "failed"])},
         ["The message to {0} was {status}."]),
    Tool("timer", ["set_timer", "timer", "start_timer"],
         ["Start a timer.", "Set a timer for some minutes."],
         [Param(["minutes", "duration", "length"], "integer", "How many minutes", _number(1, 99))],
         ["Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."],
         "a timer of {0} minutes",
         lambda r, a: {"timer": r.randint(1, 99)},
         ["Timer {timer} is set for {0} minutes."]),
    Tool("file", ["read_file", "open_file", "cat"],
         ["Read a file.", "Show the content of a file."],
         [Param(["path", "file", "filename"], "string", "The path of the file", _path)],
         ["Read the file {0}.", "Show me {0}.", "What is in the file {0}?"],
         "the file {0}",
         lambda r, a: {"content": _phrase(r)},
         ["The file {0} says: {content}"]),
    Tool("search", ["search", "find_text", "grep"],
         ["Search the notes for some words.", "Find notes that contain a text."],
         [Param(["query", "text", "pattern"], "string", "What to search for", _phrase)],
         ["Search the notes for {0}.", "Find notes about {0}.", "Look in the notes for {0}."],
         "notes about {0}",
         lambda r, a: {"matches": r.randint(0, 40), "file": _path(r)},
         ["I found {matches} notes about {0}, the first in {file}."]),
    Tool("translate", ["translate", "translate_text", "translator"],
         ["Translate a text into a language.", "Translate words for the user."],
         [Param(["text", "words", "source"], "string", "The text to translate", _phrase),
          Param(["language", "target", "into"], "string", "The language to translate into", lambda r: r.choice(w.LANGUAGES))],
         ["Translate {0} into {1}.", "Translate this into {1}: {0}", "How do you say {0} in {1}?"],
         "a translation into {1}",
         lambda r, a: {"translation": "".join(r.choice(w.SYLLABLES) for _ in range(r.randint(2, 4)))},
         ["In {1} it is \"{translation}\"."]),
    Tool("event", ["create_event", "add_event", "calendar_add"],
         ["Add an event to the calendar.", "Create a calendar event."],
         [Param(["title", "name", "event"], "string", "The title of the event", lambda r: f"{r.choice(w.JOBS)} {r.choice(['meeting', 'lunch', 'visit', 'call'])}"),
          Param(["day", "date", "when"], "string", "The day of the week", lambda r: r.choice(w.DAYS))],
         ["Add {0} to my calendar on {1}.", "Put {0} in the calendar for {1}.", "Create the event {0} on {1}."],
         "the event {0}",
         lambda r, a: {"event": r.randint(100, 999)},
         ["I added {0} on {1} as event {event}."]),
    Tool("table", ["book_table", "reserve", "reservation"],
         ["Book a table in a restaurant.", "Reserve a table for some people."],
         [Param(["restaurant", "place", "name"], "string", "The name of the restaurant", lambda r: f"The {r.choice(w.COLORS).title()} {r.choice(w.ANIMALS).title()}"),
          Param(["people", "guests", "seats"], "integer", "For how many people", _number(1, 12))],
         ["Book a table for {1} at {0}.", "Reserve a table at {0} for {1} people.", "We are {1} people, get us a table at {0}."],
         "a table at {0}",
         lambda r, a: {"hour": r.randint(17, 22)},
         ["A table for {1} at {0} is booked for {hour}:00."]),
    Tool("light", ["switch_light", "light", "set_light"],
         ["Switch a light on or off.", "Control the light of a room."],
         [Param(["room", "where", "place"], "string", "The room", lambda r: r.choice(w.ROOMS)),
          Param(["state", "mode", "power"], "string", "on or off", lambda r: r.choice(["on", "off"]))],
         ["Switch {1} the light in the {0}.", "Turn {1} the {0} light.", "Please turn the light in the {0} {1}."],
         "the light in the {0}",
         lambda r, a: {"watts": r.randint(3, 60)},
         ["The light in the {0} is now {1} at {watts} watts."]),
    Tool("stock", ["get_stock", "count_items", "inventory"],
         ["Get how many items of a thing are in stock.", "Look up the stock of an item."],
         [Param(["item", "product", "thing"], "string", "The name of the item", lambda r: f"{r.choice(w.COLORS)} {r.choice(w.OBJECTS)}")],
         ["How many {0} items are in stock?", "Look up the stock of the {0}.", "Do we have any {0} in stock?"],
         "the stock of the {0}",
         lambda r, a: {"count": r.randint(0, 500), "shelf": r.randint(1, 40)},
         ["We have {count} of the {0} on shelf {shelf}."]),
    Tool("distance", ["get_distance", "distance", "route_length"],
         ["Get the distance between two cities.", "Tell how far two cities are apart."],
         [Param(["from", "start", "origin"], "string", "The first city", _city),
          Param(["to", "end", "destination"], "string", "The second city", _city)],
         ["How far is it from {0} to {1}?", "What is the distance between {0} and {1}?", "Tell me the distance from {0} to {1}."],
         "the distance from {0} to {1}",
         lambda r, a: {"km": r.randint(50, 9999)},
         ["It is {km} km from {0} to {1}."]),
    Tool("phone", ["find_phone", "phone_book", "get_number"],
         ["Find the phone number of a person.", "Look up a phone number."],
         [Param(["person", "name", "who"], "string", "The name of the person", _people)],
         ["What is the phone number of {0}?", "Find the number of {0}.", "How can I call {0}?"],
         "the phone number of {0}",
         lambda r, a: {"number": "".join(str(r.randint(0, 9)) for _ in range(6))},
         ["The number of {0} is {number}."]),
    Tool("song", ["play_song", "play", "music_player"],
         ["Play a song.", "Play music by title."],
         [Param(["title", "song", "track"], "string", "The title of the song", lambda r: f"{r.choice(w.TRAITS)} {r.choice(w.WORDS)}")],
         ["Play the song {0}.", "I want to hear {0}.", "Put on {0}, please."],
         "the song {0}",
         lambda r, a: {"seconds": r.randint(90, 400)},
         ["Now playing {0}, {seconds} seconds long."]),
]


@dataclass
class Declared:
    """A tool in one wording: `spec` is what the request carries, `keys` its parameter names in order."""

    tool: Tool
    name: str
    keys: list
    spec: dict


def declare(r, tool, used):
    """Draws a wording of `tool` whose function name is not in `used`."""
    name = r.choice([n for n in tool.names if n not in used])
    keys = []
    for p in tool.params:
        keys.append(r.choice([n for n in p.names if n not in keys]))
    spec = {"type": "function", "function": {"name": name, "description": r.choice(tool.about), "parameters": {
        "type": "object",
        "properties": {k: {"type": p.type, "description": p.about} for k, p in zip(keys, tool.params)},
        "required": keys}}}
    return Declared(tool, name, keys, spec)


def request(r, tool):
    """A sentence that asks for `tool`, with the argument values in parameter order."""
    values = [p.draw(r) for p in tool.params]
    return r.choice(tool.requests).format(*values), values


def respond(r, tool, values):
    """A result of the call as JSON text, and the sentence that reports it."""
    result = tool.result(r, values)
    return json.dumps(result), r.choice(tool.reports).format(*values, **result)
