"""Drives `lily-server` with the official `openai` client.

    python tests/clients/openai_client.py target/debug [--model-path DIR]

Starts the server from that folder on a free port, runs the checks below against it, stops it with SIGTERM and
expects a clean end. Without --model-path the built-in demo is served.
"""

import json
import os
import subprocess

import lily_server
import openai
import pydantic
from lily_server import WEATHER

QUESTION = "What is 17 + 25?"


def user(text):
    return [{"role": "user", "content": text}]


def counts(usage):
    """What usage counts, apart from what the cache had: that depends on who asked before."""
    return usage.prompt_tokens, usage.completion_tokens, usage.completion_tokens_details


def streamed(client, **request):
    """The joined deltas of a streamed chat, its finish reason and its usage."""
    content, reasoning, calls, finish, usage = "", "", {}, None, None
    with client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    name, arguments = calls.get(call.index, ("", ""))
                    calls[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
                finish = choice.finish_reason or finish
    return content, reasoning, [calls[i] for i in sorted(calls)], finish, counts(usage)


def whole(client, **request):
    """The same of a chat that is not streamed."""
    completion = client.chat.completions.create(**request)
    message = completion.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return message.content or "", reasoning, calls, completion.choices[0].finish_reason, counts(completion.usage)


def check_models(client, model):
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def check_stream_equals_whole_equals_cli(client, model, ask_cli):
    request = {"model": model, "messages": user(QUESTION), "max_tokens": 64}
    assert streamed(client, **request) == whole(client, **request)
    assert whole(client, **request)[0] == ask_cli(QUESTION, "--max-tokens", "64").removesuffix("\n")


def check_thinking(client, model):
    request = {"model": model, "messages": user(QUESTION), "max_tokens": 200, "reasoning_effort": "high"}
    answer = streamed(client, **request)
    assert answer == whole(client, **request)
    assert answer[1], "no reasoning_content"
    assert "<think>" not in answer[0] + answer[1] and "</think>" not in answer[0] + answer[1]


def check_tools(client, model, demo):
    request = {
        "model": model,
        "messages": user("What is the weather in Rome?"),
        "tools": [WEATHER],
        "max_tokens": 200,
    }
    answer = streamed(client, **request)
    assert answer == whole(client, **request)
    if demo:
        assert answer[3] == "tool_calls" and [name for name, _ in answer[2]] == ["get_weather"], answer


def check_choices_and_logprobs(client, model):
    request = {"model": model, "messages": user(QUESTION), "max_tokens": 8}
    sampled = client.chat.completions.create(**request, n=3, temperature=1.5, seed=7)
    assert [choice.index for choice in sampled.choices] == [0, 1, 2]
    again = client.chat.completions.create(**request, n=3, temperature=1.5, seed=7)
    assert [c.message.content for c in sampled.choices] == [c.message.content for c in again.choices]
    scored = client.chat.completions.create(**request, logprobs=True, top_logprobs=2).choices[0]
    for position in scored.logprobs.content:
        assert len(position.top_logprobs) == 2
        assert position.logprob == position.top_logprobs[0].logprob, "greedy takes the likeliest"


def check_stop_and_length(client, model):
    request = {"model": model, "messages": user("Count from 1 to 9.")}
    assert whole(client, **request, max_tokens=2)[3] == "length"
    text = whole(client, **request, max_tokens=32)[0]
    if len(text) > 3:
        cut = text[2]
        assert whole(client, **request, max_tokens=32, stop=cut)[0] == text[: text.index(cut)]


def check_completions(client, model):
    request = {"model": model, "prompt": "<|im_start|>user\n" + QUESTION, "max_tokens": 8, "n": 2, "logprobs": 2}
    completion = client.completions.create(**request)
    texts = [choice.text for choice in completion.choices]
    assert all(len(choice.logprobs.tokens) <= 8 for choice in completion.choices)
    pieces = ["", ""]
    for event in client.completions.create(**request, stream=True):
        pieces[event.choices[0].index] += event.choices[0].text
    assert pieces == texts and texts[0] == texts[1], texts


# The same tool as Responses declares it.
FLAT_WEATHER = {"type": "function", **WEATHER["function"]}


def said(response):
    """What a response says, apart from ids and times."""
    items = [item.to_dict() for item in response.output]
    for item in items:
        item.pop("id")
        item.pop("call_id", None)
    return items, response.status, response.usage.input_tokens, response.usage.output_tokens


def responded(client, **request):
    """The response, which must be the same whole and streamed, its events in the protocol's order."""
    whole = client.responses.create(**request)
    texts, arguments, reasoning, open_items, done, numbers = {}, {}, {}, [], [], []
    with client.responses.create(**request, stream=True) as stream:
        events = list(stream)
    for event in events:
        numbers.append(event.sequence_number)
        place = getattr(event, "output_index", None)
        match event.type:
            case "response.output_item.added":
                assert not open_items and place == len(done), event
                open_items.append(place)
            case "response.output_item.done":
                assert open_items.pop() == place, event
                done.append(event.item)
            case "response.output_text.delta":
                texts[place] = texts.get(place, "") + event.delta
            case "response.output_text.done":
                assert texts[place] == event.text, event
            case "response.function_call_arguments.delta":
                arguments[place] = arguments.get(place, "") + event.delta
            case "response.function_call_arguments.done":
                assert arguments[place] == event.arguments and json.loads(event.arguments) is not None, event
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                reasoning[place] = reasoning.get(place, "") + event.delta
            case "response.reasoning_text.done" | "response.reasoning_summary_text.done":
                assert reasoning[place] == event.text, event
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"], events
    assert events[-1].type == f"response.{whole.status}" and not open_items, events
    assert numbers == list(range(len(events))), numbers
    last = events[-1].response
    assert last.output == done and said(last) == said(whole), (last, whole)
    assert "".join(texts.values()) == whole.output_text
    return whole


def check_responses(client, model, demo):
    response = responded(client, model=model, input=QUESTION, max_output_tokens=64, metadata={"a": "b"})
    if demo:
        assert response.output_text == "42" and response.status == "completed", response
    assert response.metadata == {"a": "b"} and response.model == model
    same = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    assert said(responded(client, model=model, input=same, max_output_tokens=64)) == said(response)
    short = responded(client, model=model, input="Hello! Who are you?", max_output_tokens=2)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens"), short
    scored = responded(client, model=model, input=QUESTION, max_output_tokens=8, top_logprobs=2)
    assert all(len(token.top_logprobs) == 2 for token in scored.output[0].content[0].logprobs), scored


def check_response_reasoning(client, model):
    request = {"model": model, "input": QUESTION, "max_output_tokens": 200}
    plain = responded(client, **request, reasoning={"effort": "high"})
    assert plain.output[0].type == "reasoning" and plain.output[0].content[0].text, plain
    assert plain.usage.output_tokens_details.reasoning_tokens > 0
    sealed = ["reasoning.encrypted_content"]
    summed = responded(client, **request, reasoning={"effort": "high", "summary": "auto"}, include=sealed, store=False)
    assert summed.output[0].summary[0].text == plain.output[0].content[0].text, summed
    assert summed.output[0].encrypted_content and summed.output_text == plain.output_text
    turns = [*user(QUESTION), *summed.output, *user("What is 2 + 2?")]
    responded(client, **{**request, "input": turns}, reasoning={"effort": "none"})


def check_response_tools(client, model, demo):
    request = {"model": model, "tools": [FLAT_WEATHER], "max_output_tokens": 200, "instructions": "Be brief."}
    question = user("What is the weather in Rome?")
    response = responded(client, **request, input=question)
    calls = [item for item in response.output if item.type == "function_call"]
    if demo:
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}], response
    output = '{"temperature": 21}'
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": output} for call in calls]
    if results:
        continued = responded(client, **request, input=results, previous_response_id=response.id)
        sent_back = responded(client, **request, input=[*question, *response.output, *results], store=False)
        assert said(continued) == said(sent_back)
        assert not demo or "21" in continued.output_text, continued
        kept = [item.type for item in client.responses.input_items.list(continued.id, order="asc")]
        assert kept == ["message", "function_call", "function_call_output"], kept
    forced = responded(client, **request, input=question, tool_choice={"type": "function", "name": "get_weather"})
    assert [item.type for item in forced.output] == ["function_call"], forced


class Sum(pydantic.BaseModel):
    sum: int = pydantic.Field(ge=0, le=99)


def check_response_formats(client, model):
    # White space between words is allowed, and bounded; the demo likes it.
    parsed = client.responses.parse(model=model, input=QUESTION, text_format=Sum, max_output_tokens=600)
    assert isinstance(parsed.output_parsed, Sum), parsed
    text = {"format": {"type": "json_object"}}
    object = responded(client, model=model, input="JSON.", text=text, max_output_tokens=100)
    assert object.output_text.startswith("{"), object


def check_response_store(client, model):
    request = {"model": model, "input": QUESTION, "max_output_tokens": 8}
    kept = client.responses.create(**request)
    assert client.responses.retrieve(kept.id) == kept
    counted = client.responses.input_tokens.count(model=model, input=QUESTION)
    assert counted.input_tokens == kept.usage.input_tokens
    client.responses.delete(kept.id)
    passing = client.responses.create(**request, store=False)
    for id in (kept.id, passing.id):
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            try:
                ask(id)
            except openai.NotFoundError:
                continue
            raise AssertionError(f"{id} is still there")


def check_response_refusals(client, model):
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
    orphan = [{"type": "function_call_output", "call_id": "nobody's", "output": "x"}]
    cases = [
        ({"background": True}, "background", "unsupported_parameter"),
        ({"input": image}, "input[0].content[0].type", "unsupported_parameter"),
        ({"input": orphan}, "input[0].call_id", "invalid_value"),
        ({"input": "long " * 400_000}, "input", "context_length_exceeded"),
        ({"model": "another"}, "model", "model_not_found"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "previous_response_not_found"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 7}}}, "text.format.schema", "invalid_value"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0].type", "unsupported_parameter"),
    ]
    for change, field, code in cases:
        try:
            client.responses.create(**{"model": model, "input": "hi", **change})
        except openai.APIStatusError as error:
            assert (error.param, error.code) == (field, code), error
        else:
            raise AssertionError(f"{field} was accepted")


def check_refusals(client, model):
    image = user([{"type": "image_url", "image_url": {"url": "data:,"}}])
    long = user("long " * 400_000)
    cases = [
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
        ({"temperature": 9}, "temperature", "invalid_value"),
        ({"extra_body": {"min_p": 2}}, "min_p", "invalid_value"),
        ({"messages": image}, "messages[0].content[0].type", "unsupported_parameter"),
        ({"messages": long}, "messages", "context_length_exceeded"),
        ({"model": "another"}, "model", "model_not_found"),
    ]
    for change, field, code in cases:
        try:
            client.chat.completions.create(**{"model": model, "messages": user("hi"), **change})
        except openai.APIStatusError as error:
            assert (error.param, error.code) == (field, code), error
        else:
            raise AssertionError(f"{field} was accepted")


def main():
    args, flags = lily_server.arguments(__doc__)

    def ask_cli(question, *more):
        command = [os.path.join(args.programs, "lily"), "chat", question, *more, *flags]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    server = lily_server.Server(args.programs, flags)
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    checks = [
        lambda: check_models(client, model),
        lambda: check_stream_equals_whole_equals_cli(client, model, ask_cli),
        lambda: check_thinking(client, model),
        lambda: check_tools(client, model, demo=not args.model_path),
        lambda: check_choices_and_logprobs(client, model),
        lambda: check_stop_and_length(client, model),
        lambda: check_completions(client, model),
        lambda: check_refusals(client, model),
        lambda: check_responses(client, model, demo=not args.model_path),
        lambda: check_response_reasoning(client, model),
        lambda: check_response_tools(client, model, demo=not args.model_path),
        lambda: check_response_formats(client, model),
        lambda: check_response_store(client, model),
        lambda: check_response_refusals(client, model),
    ]
    lily_server.run(server, checks, [openai.OpenAIError, pydantic.ValidationError])


if __name__ == "__main__":
    main()
