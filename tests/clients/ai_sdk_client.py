"""Drives `lily-server` with the Vercel AI SDK (`@ai-sdk/openai-compatible`): a stream with a tool.

    (cd tests/clients/ai_sdk && npm ci)
    python tests/clients/ai_sdk_client.py target/debug tests/clients/ai_sdk/client.mjs [--model-path DIR]
"""

import json
import subprocess
import urllib.request

import lily_server


def served_model(server):
    with urllib.request.urlopen(server.url + "/models") as answer:
        return json.load(answer)["data"][0]["id"]


def check_tool_loop(server, client, demo):
    run = subprocess.run(
        ["node", client, server.url, served_model(server)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["parts"].count("finish-step") == len(told["finishes"]) and told["parts"][-1] == "finish", told
    assert told["usage"]["inputTokens"] > 0 and told["usage"]["outputTokens"] > 0, told
    if demo:
        assert told["finishes"] == ["tool-calls", "stop"] and told["cities"] == ["Rome"], told
        assert "21" in told["text"] and "text-delta" in told["parts"], told


def main():
    args, flags = lily_server.arguments(__doc__, client="client.mjs, beside the packages that it needs")
    server = lily_server.Server(args.programs, flags)
    lily_server.run(server, [lambda: check_tool_loop(server, args.client, demo=not args.model_path)], [subprocess.SubprocessError])


if __name__ == "__main__":
    main()
