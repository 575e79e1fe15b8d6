"""Drives `lily-server` with `openai-agents`: a tool loop over Responses and one over Chat Completions.

    python tests/clients/agents_client.py target/debug [--model-path DIR]
"""

import asyncio

import agents
import lily_server
import openai

QUESTION = "What is the weather in Rome?"


def check_tool_loop(model, demo):
    asked = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city.

        Args:
            city: The city.
        """
        asked.append(city)
        return '{"temperature": 21}'

    settings = agents.ModelSettings(max_tokens=200)
    agent = agents.Agent(name="weather", model=model, tools=[get_weather], model_settings=settings)

    async def both():
        whole = await agents.Runner.run(agent, QUESTION, max_turns=4)
        stream = agents.Runner.run_streamed(agent, QUESTION, max_turns=4)
        kinds = [event.type async for event in stream.stream_events()]
        return whole.final_output, stream.final_output, kinds

    whole, streamed, kinds = asyncio.run(both())
    assert streamed == whole and "raw_response_event" in kinds, (streamed, whole)
    if demo:
        assert asked == ["Rome", "Rome"] and "21" in whole, (asked, whole)


def main():
    args, flags = lily_server.arguments(__doc__)
    agents.set_tracing_disabled(True)
    server = lily_server.Server(args.programs, flags)
    name = openai.OpenAI(base_url=server.url, api_key="none").models.list().data[0].id
    demo = not args.model_path

    # Each check has an event loop of its own, and so a client.
    def client():
        return openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)

    checks = [
        lambda: check_tool_loop(agents.OpenAIResponsesModel(model=name, openai_client=client()), demo),
        lambda: check_tool_loop(agents.OpenAIChatCompletionsModel(model=name, openai_client=client()), demo),
    ]
    lily_server.run(server, checks, [openai.OpenAIError, agents.AgentsException])


if __name__ == "__main__":
    main()
