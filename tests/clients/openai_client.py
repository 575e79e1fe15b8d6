"""Drives `lily-server` with the official `openai` client.

    python tests/clients/openai_client.py target/debug [--model-path DIR]

Starts the server from that folder on a free port, runs the checks below against it, stops it with SIGTERM and
expects a clean end. Without --model-path the built-in demo is served.
"""

import os
import subprocess

import lily_server
import openai

QUESTION = "What is 17 + 25?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city."}},
            "required": ["city"],
        },
    },
}


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
    ]
    lily_server.run(server, checks, [openai.OpenAIError])


if __name__ == "__main__":
    main()
