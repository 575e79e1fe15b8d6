"""Many clients at once: 64 of them, 2,000 requests, in three protocols, streamed and whole.

    python tests/load/load_test.py target/release [--clients N] [--requests N] [--seed N]

Starts `lily-server` on the demo on a free port of this machine. First every question is asked alone, greedy; those
answers are what all later ones are compared to, letter by letter. Then the clients ask: Chat Completions, Completions
and Messages, half of them streamed; a tenth hang up half-way, a tenth read slowly. Of every stream the order of its
events is checked. A full queue (429) is the one error that may come; it is waited out by `Retry-After`. Afterwards the
figures at `/metrics` must agree with what the clients saw, memory must be what it was, and SIGTERM must end the server
with 0. Prints what happened as a table and exits with 1 if anything was wrong.
"""

import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

QUESTIONS = (
    [f"What is {a} + {b}?" for a, b in zip(range(11, 60, 3), range(70, 20, -3))]
    + ["Hello! Who are you?", "Tell me a story.", "Count from 1 to 9.", "Sort these numbers: 9 4 7 1."]
    + [f"Repeat this word: {word}" for word in ("lily", "pond", "reed", "water", "heron")]
)
LONGEST = 96
# A slow reader waits so long between two reads of a few bytes.
PAUSE_SECONDS = 0.02
SIP_BYTES = 64
PROTOCOLS = ("chat", "completions", "messages")


def request(protocol, question, stream):
    """Path and body of a question."""
    turns = [{"role": "user", "content": question}]
    if protocol == "chat":
        return "/v1/chat/completions", {"messages": turns, "max_tokens": LONGEST, "stream": stream}
    if protocol == "messages":
        return "/v1/messages", {"model": "lily-demo", "messages": turns, "max_tokens": LONGEST, "stream": stream}
    return "/v1/completions", {"prompt": question, "max_tokens": 24, "stream": stream}


def whole(protocol, body):
    """The text of an answer and how it ended."""
    answer = json.loads(body)
    if protocol == "chat":
        choice = answer["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    if protocol == "messages":
        return "".join(block["text"] for block in answer["content"]), answer["stop_reason"]
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]


def streamed(protocol, events):
    """The same of the events of a stream, whose order must be the protocol's."""
    if protocol == "messages":
        return streamed_message(events)
    assert events[-1] == (None, "[DONE]"), events[-3:]
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    texts, finish = [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert finish is None, "an event follows the last one"
        finish = choice["finish_reason"]
        texts.append(choice["delta"].get("content") or "" if protocol == "chat" else choice["text"])
    return "".join(texts), finish


def streamed_message(events):
    names = [name for name, _ in events if name != "ping"]
    bodies = [json.loads(data) for name, data in events if name != "ping"]
    assert all(name == body["type"] for name, body in zip(names, bodies))
    pattern = r"message_start( content_block_start( content_block_delta)* content_block_stop)* message_delta message_stop"
    assert re.fullmatch(pattern, " ".join(names)), names
    text = "".join(body["delta"].get("text", "") for body in bodies if body["type"] == "content_block_delta")
    return text, bodies[-2]["delta"]["stop_reason"]


def events(text):
    """Names and data of server-sent events."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            found.append((fields.get("event"), fields["data"]))
    return found


class Client:
    """One of the clients, with figures of its own."""

    def __init__(self, address, expected, seed):
        self.address, self.expected, self.random = address, expected, random.Random(seed)
        self.counts, self.wrong, self.first, self.took = collections.Counter(), [], [], []

    def work(self, tickets):
        for _ in tickets:
            protocol, question = self.random.choice(PROTOCOLS), self.random.choice(QUESTIONS)
            stream = self.random.random() < 0.5
            manner = self.random.choices(("plain", "hang up", "slow"), (8, 1, 1))[0]
            try:
                self.ask(protocol, question, stream, manner)
            except Exception as error:  # noqa: BLE001: whatever it is, it is what this program looks for
                self.wrong.append(f"{protocol} {'streamed' if stream else 'whole'} {manner} {question!r}: {error!r}")

    def ask(self, protocol, question, stream, manner):
        path, body = request(protocol, question, stream)
        while True:
            began = time.perf_counter()
            connection = http.client.HTTPConnection(self.address, timeout=120)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            if manner == "hang up" and not stream:
                # Somewhere between the request and its answer.
                time.sleep(self.random.random() * 0.01)
                connection.close()
                self.counts["hung up"] += 1
                return
            response = connection.getresponse()
            if response.status != 429:
                break
            wait = int(response.headers["Retry-After"])
            assert 1 <= wait <= 60, wait
            response.read()
            connection.close()
            self.counts["told to wait"] += 1
            time.sleep(self.random.uniform(0.5, 1.0) * wait)
        assert response.status == 200, (response.status, response.read()[:300])
        if not stream:
            found = whole(protocol, response.read())
        else:
            first = response.read1(SIP_BYTES)
            self.first.append(time.perf_counter() - began)
            if manner == "hang up":
                connection.close()
                self.counts["hung up"] += 1
                return
            found = streamed(protocol, events((first + self.rest(response, manner)).decode()))
        self.took.append(time.perf_counter() - began)
        connection.close()
        assert found == self.expected[protocol, question], (found, self.expected[protocol, question])
        self.counts["answered " + ("streamed" if stream else "whole")] += 1
        if manner == "slow" and stream:
            self.counts["read slowly"] += 1

    def rest(self, response, manner):
        if manner != "slow":
            return response.read()
        sips = []
        while sip := response.read1(SIP_BYTES):
            sips.append(sip)
            time.sleep(PAUSE_SECONDS)
        return b"".join(sips)


class Server:
    """A running server."""

    def __init__(self, programs, flags):
        command = [os.path.join(programs, "lily-server"), "--port", "0", "--log-level", "warn", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"serving at http://([^/]+)", line):
                self.address = found[1]
                break
        else:
            raise SystemExit("lily-server ended before it served")
        self.log = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def resident(self):
        """Resident memory in MB; Linux alone tells."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            (line,) = [line for line in status if line.startswith("VmRSS")]
            return int(line.split()[1]) * 1024 / 1e6

    def get(self, path):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def figures(self):
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        figures = collections.Counter()
        for line in lines:
            name, value = line.rsplit(" ", 1)
            reason = re.search(r'finished_reason="(\w+)"', name)
            figures[name.split("{")[0] + (" " + reason[1] if reason else "")] += float(value)
        return figures

    def wait_until_idle(self):
        while True:
            health = json.loads(self.get("/health"))
            if health["running"] == health["waiting"] == 0:
                return
            time.sleep(0.05)


def percentile(values, part):
    return sorted(values)[min(len(values) - 1, int(len(values) * part))] if values else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", help="folder that holds lily-server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    # A short queue, so that the one error that may come does come.
    server = Server(args.programs, ["--max-concurrent", "8", "--max-queue", "40"])
    try:
        sys.exit(load(args, server))
    finally:
        server.process.kill()


def load(args, server):
    expected = {}
    for protocol in PROTOCOLS:
        for question in QUESTIONS:
            connection = http.client.HTTPConnection(server.address, timeout=60)
            path, body = request(protocol, question, False)
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            expected[protocol, question] = whole(protocol, connection.getresponse().read())
    server.wait_until_idle()
    before, memory = server.figures(), [server.resident()]

    tickets = iter(range(args.requests))
    lock = threading.Lock()

    def ticket():
        while True:
            with lock:
                number = next(tickets, None)
            if number is None:
                return
            if number % max(1, args.requests // 8) == 0:
                memory.append(server.resident())
            yield number

    clients = [Client(server.address, expected, args.seed * 1000 + index) for index in range(args.clients)]
    threads = [threading.Thread(target=client.work, args=(ticket(),)) for client in clients]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    server.wait_until_idle()
    memory.append(server.resident())
    after = server.figures()

    counts = sum((client.counts for client in clients), collections.Counter())
    wrong = [line for client in clients for line in client.wrong]
    first = [value for client in clients for value in client.first]
    took = [value for client in clients for value in client.took]
    gained = {name: after[name] - before[name] for name in after}
    success = "vllm:request_success_total "
    ended = {reason: int(gained[success + reason]) for reason in ("stop", "length", "abort", "error")}
    answered = counts["answered whole"] + counts["answered streamed"]
    if ended["error"]:
        wrong.append(f"{ended['error']} answers failed")
    if ended["stop"] + ended["length"] < answered:
        wrong.append(f"the server counts {ended}, the clients {answered} answers")
    settled = memory[len(memory) // 2 :]
    if max(settled) - min(settled) > 0.1 * min(settled):
        wrong.append(f"memory is not flat: {[round(value) for value in memory]} MB")
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(timeout=60)
    if code != 0:
        wrong.append(f"the server ended with {code}")
    warnings = [line for line in server.log if not line.startswith("lily: stopping")]
    if warnings:
        wrong.append("the server warned: " + "".join(warnings[:10]))

    rows = [("clients", args.clients), ("requests", args.requests), ("seconds", round(seconds, 1))]
    rows += sorted(counts.items())
    rows += [(f"the server's count: {reason}", count) for reason, count in ended.items()]
    rows += [
        ("tokens generated per second", round(gained["vllm:generation_tokens_total"] / seconds)),
        ("prompt tokens", int(gained["vllm:prompt_tokens_total"])),
        ("of them from the cache", int(gained["vllm:prefix_cache_hits_total"])),
        ("first bytes of a stream, ms: median, 99 %", [round(percentile(first, part) * 1e3) for part in (0.5, 0.99)]),
        ("whole answer, ms: median, 99 %", [round(percentile(took, part) * 1e3) for part in (0.5, 0.99)]),
        ("mean answer, ms", round(statistics.fmean(took) * 1e3) if took else 0),
        ("resident memory along the way, MB", [round(value) for value in memory]),
    ]
    for name, value in rows:
        print(f"{name:45} {value}")
    for line in wrong[:20]:
        print("WRONG", line)
    print(f"{answered} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
