"""The chat format as plain Python: the fast twin of `checkpoint/chat_template.jinja`.

The trainer renders millions of conversations, which Jinja is too slow for. `segments` returns the text in pieces, each with
a flag that says whether the model writes it (and is trained on it). `test_curriculum.py` holds the two renderings equal.
"""

import json

TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: "
    "an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n- You may provide optional reasoning for your function call in natural "
    "language BEFORE the function call, but NOT after\n- If there is no function call available, answer the question like "
    "normal with your current knowledge and do not tell the user about function calls\n</IMPORTANT>"
)


def call_text(calls):
    """The XML form of one or more tool calls, without what stands before or after."""
    out = []
    for call in calls:
        call = call.get("function", call)
        text = f"<tool_call>\n<function={call['name']}>\n"
        for key, value in call["arguments"].items():
            value = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
            text += f"<parameter={key}>\n{value}\n</parameter>\n"
        out.append(text + "</function>\n</tool_call>")
    return "\n".join(out)


def body_text(message):
    """What an assistant turn says after its reasoning."""
    text = message.get("content") or ""
    if message.get("tool_calls"):
        text += ("\n\n" if text else "") + call_text(message["tool_calls"])
    return text


def opening(enable_thinking):
    """What the prompt of an answer ends with."""
    return "<|im_start|>assistant\n" + ("<think>\n" if enable_thinking is not False else "<think>\n\n</think>\n\n")


def segments(messages, tools=None, enable_thinking=None, answer=False):
    """Renders a conversation as `[(text, written_by_model)]`.

    With `answer`, the last message is the answer to be learnt and stands behind the opening that `enable_thinking` asks for;
    without, the rendering ends with that opening. Earlier answers carry no reasoning, as the template strips it, except in
    the tool-calling steps after the last question.
    """
    out, start = [], 0
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if system is not None:
        start = 1
    if tools:
        declared = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in tools)
        out.append((f"<|im_start|>system\n{TOOLS_HEAD}{declared}{TOOLS_TAIL}" + (f"\n\n{system}" if system else "") + "<|im_end|>\n", False))
    elif system is not None:
        out.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    final = messages[-1] if answer else None
    turns = messages[start:-1] if answer else messages[start:]
    last_query = max(i for i, m in enumerate(turns) if m["role"] == "user")
    for i, m in enumerate(turns):
        if m["role"] == "user":
            out.append((f"<|im_start|>user\n{m['content'].strip()}<|im_end|>\n", False))
        elif m["role"] == "assistant":
            if i > last_query:
                out.append((f"<|im_start|>assistant\n<think>\n{m.get('reasoning_content', '')}\n</think>\n\n", False))
            else:
                out.append(("<|im_start|>assistant\n", False))
            out.append((body_text(m) + "<|im_end|>", True))
            out.append(("\n", False))
        else:
            first = turns[i - 1]["role"] != "tool"
            last = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
            out.append(("<|im_start|>user" * first + f"\n<tool_response>\n{m['content']}\n</tool_response>" + "<|im_end|>\n" * last, False))
    out.append((opening(enable_thinking), False))
    if answer:
        text = body_text(final) + "<|im_end|>"
        if enable_thinking is not False:
            text = f"{final['reasoning_content']}\n</think>\n\n{text}"
        out.append((text, True))
    return out


def render(messages, tools=None, enable_thinking=None, answer=False):
    """The whole conversation as one string."""
    return "".join(text for text, _ in segments(messages, tools, enable_thinking, answer))
