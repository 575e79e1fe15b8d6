"""Drives `lily-server` with the official `anthropic` client.

    python tests/clients/anthropic_client.py target/debug [--model-path DIR]

Starts the server from that folder on a free port, runs the checks below against it, stops it with SIGTERM and
expects a clean end. Without --model-path the built-in demo is served.
"""

import json

import anthropic
import lily_server

QUESTION = "What is 17 + 25?"
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city."}},
        "required": ["city"],
    },
}
ADAPTIVE = {"type": "adaptive"}


def connect(server, **key):
    # The client adds the version to the paths itself.
    return anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), max_retries=0, **key)


def served_model(client):
    return client.models.list().data[0].id


def user(content):
    return {"role": "user", "content": content}


def comparable(message):
    """What a message says, apart from ids and from what the cache had: that depends on who asked before."""
    blocks = [{**block.to_dict(), "id": None} for block in message.content]
    read = message.usage.input_tokens + message.usage.cache_read_input_tokens
    return blocks, message.stop_reason, message.stop_sequence, read, message.usage.output_tokens


def both(client, **request):
    """The message, which must be the same whole and streamed."""
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert comparable(streamed) == comparable(whole), (streamed, whole)
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    return whole


def check_models(client, model):
    listed = client.models.list()
    assert [(info.type, info.id) for info in listed] == [("model", model)] and listed._request_id, listed
    assert client.models.retrieve(model).max_input_tokens > 0


def check_text(client, model, demo):
    message = both(client, model=model, max_tokens=64, messages=[user(QUESTION)])
    assert message.role == "assistant" and message.model == model
    if demo:
        assert [block.text for block in message.content] == ["42"], message
        assert message.stop_reason == "end_turn"


def check_events(client, model):
    names = []
    request = {"model": model, "max_tokens": 64, "messages": [user(QUESTION)]}
    for event in client.messages.create(**request, stream=True):
        names.append(event.type)
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"], names
    assert names[1] == "content_block_start" and names[-3] == "content_block_stop", names


def check_thinking(client, model):
    request = {"model": model, "max_tokens": 200, "messages": [user(QUESTION)], "thinking": ADAPTIVE}
    message = both(client, **request)
    thinking = message.content[0]
    assert thinking.type == "thinking" and thinking.thinking and thinking.signature, message
    assert message.usage.output_tokens_details.thinking_tokens > 0
    turns = [user(QUESTION), {"role": "assistant", "content": message.content}, user("What is 2 + 2?")]
    both(client, **{**request, "messages": turns, "thinking": {"type": "disabled"}})


def check_tools(client, model, demo):
    question = user("What is the weather in Rome?")
    request = {"model": model, "max_tokens": 200, "tools": [WEATHER], "system": "Be brief."}
    message = both(client, **request, messages=[question])
    calls = [block for block in message.content if block.type == "tool_use"]
    if demo:
        assert message.stop_reason == "tool_use" and [call.input for call in calls] == [{"city": "Rome"}], message
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": '{"temperature": 21}'}]}
        for call in calls
    ]
    if results:
        turns = [question, {"role": "assistant", "content": message.content}, user(results)]
        answer = both(client, **request, messages=turns)
        assert not demo or "21" in answer.content[0].text, answer


def check_enforcement(client, model):
    request = {"model": model, "max_tokens": 300, "messages": [user(QUESTION)]}
    call = client.messages.create(**request, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"})
    assert [block.type for block in call.content] == ["tool_use"], call
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    answer = both(client, **request, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert 0 <= json.loads(answer.content[0].text)["sum"] <= 99, answer
    bounded = both(client, **request, thinking={"type": "enabled", "budget_tokens": 8})
    assert bounded.usage.output_tokens_details.thinking_tokens < 16, bounded


def check_stops_and_length(client, model):
    request = {"model": model, "messages": [user("Hello! Who are you?")]}
    assert both(client, **request, max_tokens=2).stop_reason == "max_tokens"
    text = both(client, **request, max_tokens=32).content[0].text
    if len(text) > 8:
        cut = text[6:8]
        message = both(client, **request, max_tokens=32, stop_sequences=["never said", cut])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", cut), message
        assert "".join(block.text for block in message.content) == text[: text.index(cut)]


def check_sampling(client, model):
    request = {"model": model, "max_tokens": 12, "messages": [user("Tell me a story.")]}
    both(client, **request, extra_body={"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 7})


def check_counts(client, model):
    request = {"model": model, "messages": [user(QUESTION)], "tools": [WEATHER], "system": "Be precise. " * 40}
    count = client.messages.count_tokens(**request).input_tokens
    first = client.messages.create(**request, max_tokens=4).usage
    again = client.messages.create(**request, max_tokens=4).usage
    for usage in (first, again):
        assert usage.input_tokens + usage.cache_read_input_tokens == count, usage
    assert again.cache_read_input_tokens > 0, again


def check_refusals(client, model):
    image = [user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}])]
    cases = [
        ({"messages": image}, anthropic.BadRequestError, "messages[0].content[0].type"),
        ({"messages": [user("long " * 400_000)]}, anthropic.BadRequestError, "context"),
        ({"model": "another"}, anthropic.NotFoundError, "another"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"extra_body": {"top_p": 2}}, anthropic.BadRequestError, "top_p"),
    ]
    for change, expected, named in cases:
        try:
            client.messages.create(**{"model": model, "max_tokens": 8, "messages": [user("hi")], **change})
        except anthropic.APIStatusError as error:
            assert isinstance(error, expected) and error.body["type"] == "error", error
            assert named in error.body["error"]["message"], error
        else:
            raise AssertionError(f"{change} was accepted")


def check_key(args, flags):
    server = lily_server.Server(args.programs, [*flags, "--api-key", "secret"])
    right = connect(server, api_key="secret")
    bearer = connect(server, auth_token="secret")
    wrong = connect(server, api_key="guess")
    ask = {"model": served_model(right), "messages": [user("hi")]}
    for client in (right, bearer):
        assert client.messages.count_tokens(**ask).input_tokens > 0
    try:
        wrong.messages.count_tokens(**ask)
    except anthropic.AuthenticationError as error:
        assert error.body["error"]["type"] == "authentication_error", error
    else:
        raise AssertionError("a wrong key was accepted")
    assert server.stop() == 0


def main():
    args, flags = lily_server.arguments(__doc__)
    server = lily_server.Server(args.programs, flags)
    client = connect(server, api_key="none")
    model = served_model(client)
    demo = not args.model_path
    checks = [
        lambda: check_models(client, model),
        lambda: check_text(client, model, demo),
        lambda: check_events(client, model),
        lambda: check_thinking(client, model),
        lambda: check_tools(client, model, demo),
        lambda: check_enforcement(client, model),
        lambda: check_stops_and_length(client, model),
        lambda: check_sampling(client, model),
        lambda: check_counts(client, model),
        lambda: check_refusals(client, model),
        lambda: check_key(args, flags),
    ]
    lily_server.run(server, checks, [anthropic.AnthropicError])


if __name__ == "__main__":
    main()
