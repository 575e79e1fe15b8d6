"""Uses the page at `/` in headless Chromium, as a person would.

    python tests/page/page_test.py target/debug --browser /usr/bin/chromium [--screenshots DIR]

Starts `lily-server` from that folder on a free port, runs the checks below, stops it with SIGTERM and expects a
clean end. With --screenshots, pictures of the page in light and dark are left in that folder.
"""

import argparse
import contextlib
import json
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "clients"))

import lily_server
from lily_server import WEATHER
from playwright.sync_api import Error, expect, sync_playwright

KEY = "a key"
CHAT = "**/v1/chat/completions"
# Milliseconds for whatever is waited for: only a page that hangs takes so long, however busy the machine.
LIMIT = 60_000


class Page:
    """The page in a fresh browser context, and everything that it complained of or asked for."""

    def __init__(self, browser, url, scheme="light"):
        self.context = browser.new_context(color_scheme=scheme, viewport={"width": 1000, "height": 760})
        self.context.set_default_timeout(LIMIT)
        self.page = self.context.new_page()
        self.complaints, self.requests = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        expect(self.page.locator("#state")).to_have_attribute("data-is", "ready")

    def set(self, **fields):
        self.page.click("#open")
        for name, value in fields.items():
            self.page.fill("#" + name, value)
            self.page.locator("#" + name).dispatch_event("change")
        self.page.click("#settings button")

    def ask(self, text):
        """Types a question and waits for the end of its answer, which it returns."""
        self.page.fill("#ask", text)
        self.page.press("#ask", "Enter")
        return ended(self.page.locator(".turn.assistant").last)

    @contextlib.contextmanager
    def no_end_before(self, tokens):
        """Lets answers go on until they are `tokens` long."""

        def endless(route):
            body = json.loads(route.request.post_data) | {"ignore_eos": True, "max_tokens": tokens}
            route.continue_(post_data=json.dumps(body))

        self.page.route(CHAT, endless)
        try:
            yield
        finally:
            self.page.unroute(CHAT)


def ended(answer):
    """The answer, once it has ended."""
    expect(answer.get_by_role("button", name="Again")).to_be_visible()
    return answer


def a_question_is_answered(page):
    assert page.page.locator("#model").inner_text() == "lily-demo"
    answer = page.ask("What is 17 + 25?")
    assert answer.locator(".error").inner_text(), "without its key it is told so"
    page.set(key=KEY)
    answer = page.ask("What is 17 + 25?")
    expect(answer.locator(".said")).to_have_text("42")
    # There is a rate only where the pieces did not all come at once.
    expect(answer.locator(".speed")).to_have_text(re.compile(r"\b3 tokens · \d+ read\b.* · first after \d+\.\d\d s$"))
    assert page.page.locator("#welcome").is_hidden()


def thinking_is_folded(page):
    page.page.click("#think")
    answer = page.ask("What is 12 + 30?")
    details = answer.locator("details.thought")
    expect(details).to_be_visible()
    assert details.get_attribute("open") is None
    assert details.locator("div").text_content().strip()
    expect(answer.locator(".said")).to_have_text("42")
    page.page.click("#think")


def a_tool_is_called_and_its_result_is_answered(page):
    page.page.click("#new")
    page.set(tools=json.dumps([WEATHER]))
    turn = page.ask("What is the weather in Rome?")
    expect(turn.locator(".call .head")).to_contain_text("get_weather")
    assert json.loads(turn.locator(".call pre").inner_text()) == {"city": "Rome"}
    turn.locator(".call input").fill('{"temperature": 21}')
    turn.get_by_role("button", name="Return").click()
    answer = page.page.locator(".turn.assistant").nth(1)
    expect(ended(answer).locator(".said")).to_contain_text("21")
    page.set(tools="")


def a_long_answer_tells_its_speed(page):
    with page.no_end_before(500):
        answer = page.ask("Tell me a story.")
    told = re.compile(r"^[1-9]\d*(\.\d)? tokens/s · 500 tokens · .* · cut off at the most tokens$")
    expect(answer.locator(".speed")).to_have_text(told)


def an_answer_that_comes_at_once_has_no_speed(page):
    # As where the browser is too busy to see one piece after the other: no time passes. All that is said is noted.
    page.page.evaluate("""() => {
        performance.now = () => 1;
        window.told = [];
        const note = () => told.push(document.querySelector(".turn:last-child .speed")?.textContent);
        new MutationObserver(note).observe(document.getElementById("turns"), { childList: true, subtree: true });
    }""")
    with page.no_end_before(500):
        answer = page.ask("Tell me a story.")
    expect(answer.locator(".speed")).to_have_text(re.compile(r"^500 tokens · \d+ read\b"))
    told = page.page.evaluate("delete performance.now, told")
    assert told and not any("tokens/s" in text for text in told if text), told


def an_answer_can_be_stopped(page):
    with page.no_end_before(30_000):
        page.page.fill("#ask", "Tell me a story.")
        page.page.click("#send")
        answer = page.page.locator(".turn.assistant").last
        expect(answer.locator(".said")).not_to_be_empty()
        expect(page.page.locator("#send")).to_have_text("Stop")
        page.page.click("#send")
        expect(answer.locator(".speed")).to_contain_text("stopped")


def markup_in_an_answer_is_text(page):
    hostile = '<img src=x onerror="window.hurt=1"> <script>window.hurt=1</script> **bold** `<b>` [x](javascript:hurt)\n\n```\n</pre><svg onload=hurt()>\n```'
    head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "lily-demo"}
    delta = head | {"choices": [{"index": 0, "delta": {"content": hostile, "reasoning_content": hostile, "tool_calls": [
        {"index": 0, "id": hostile, "type": "function", "function": {"name": hostile, "arguments": hostile}}]}, "finish_reason": None}]}
    last = head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (delta, last)) + "data: [DONE]\n\n"
    page.page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    answer = page.ask("hi")
    page.page.unroute(CHAT)
    assert answer.locator("img, script, svg, a").count() == 0
    assert "<script>window.hurt=1</script>" in answer.locator(".said").inner_text()
    assert answer.locator(".said strong").inner_text() == "bold"
    assert page.page.evaluate("window.hurt") is None


def the_policy_holds(page):
    # What a hole in the page would have to do.
    blocked = """() => { try { document.body.innerHTML += '<img src=x onerror="window.hurt=1">'; return false } catch { return true } }"""
    assert page.page.evaluate(blocked)
    assert page.page.evaluate("fetch('https://example.com/').then(() => false, () => true)")
    page.complaints.clear()


def nothing_was_complained_of_and_nobody_else_was_asked(page, url):
    # The browser reports the answer that lacked its key by itself.
    complaints = [text for text in page.complaints if "401" not in text]
    assert not complaints, complaints
    strangers = [asked for asked in page.requests if not asked.startswith((url, "data:"))]
    assert not strangers, strangers


def pictures(browser, url, folder):
    for scheme in ("light", "dark"):
        page = Page(browser, url, scheme)
        page.set(key=KEY)
        page.page.screenshot(path=os.path.join(folder, f"welcome-{scheme}.png"))
        page.page.click("#think")
        page.ask("What is 17 + 25?")
        page.page.click("#think")
        page.ask("Tell me a story.")
        page.set(tools=json.dumps([WEATHER]))
        page.ask("What is the weather in Rome?")
        page.page.screenshot(path=os.path.join(folder, f"chat-{scheme}.png"))
        page.page.click("#open")
        page.page.screenshot(path=os.path.join(folder, f"settings-{scheme}.png"))
        page.context.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", help="folder that holds lily-server")
    parser.add_argument("--browser", required=True, help="Chromium's program")
    parser.add_argument("--screenshots", metavar="DIR")
    args = parser.parse_args()
    expect.set_options(timeout=LIMIT)
    server = lily_server.Server(args.programs, ["--api-key", KEY])
    try:
        check(args, server)
    finally:
        server.process.kill()


def check(args, server):
    url = server.url.removesuffix("/v1") + "/"
    with sync_playwright() as playwright:
        # Without a sandbox of its own, because CI runs as root; the page is ours.
        browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
        page = Page(browser, url)
        if args.screenshots:
            os.makedirs(args.screenshots, exist_ok=True)
            pictures(browser, url, args.screenshots)
        lily_server.run(
            server,
            [
                lambda: a_question_is_answered(page),
                lambda: thinking_is_folded(page),
                lambda: a_tool_is_called_and_its_result_is_answered(page),
                lambda: a_long_answer_tells_its_speed(page),
                lambda: an_answer_that_comes_at_once_has_no_speed(page),
                lambda: an_answer_can_be_stopped(page),
                lambda: markup_in_an_answer_is_text(page),
                lambda: nothing_was_complained_of_and_nobody_else_was_asked(page, url),
                lambda: the_policy_holds(page),
            ],
            (Error,),
        )


if __name__ == "__main__":
    main()
