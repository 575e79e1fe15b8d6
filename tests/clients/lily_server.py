"""What the client checks share: a running `lily-server`, and how checks are run and counted."""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading

# A tool that the demo knows how to call.
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


# Seconds that a server may take to end; only one that hangs takes so long.
LIMIT = 120


class Server:
    """A running `lily-server` on a free port."""

    def __init__(self, programs, flags):
        command = [os.path.join(programs, "lily-server"), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving at (http://\S+)", line):
                self.url = found[1]
                break
        else:
            raise SystemExit("lily-server ended before it served:\n" + "".join(self.log))
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=LIMIT)


def arguments(description, **more):
    """The command line of a client check, with `more` arguments and their meaning, and the server's flags that follow
    from it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", help="folder that holds lily and lily-server")
    for name, meaning in more.items():
        parser.add_argument(name, help=meaning)
    parser.add_argument("--model-path")
    args = parser.parse_args()
    return args, ["--model-path", args.model_path] if args.model_path else []


def run(server, checks, errors):
    """Runs the checks, of which each may raise AssertionError or one of `errors`, stops the server, and exits."""
    failed = 0
    for check in checks:
        name = check.__code__.co_names[0]
        try:
            check()
            print("ok", name, flush=True)
        except (AssertionError, *errors) as error:
            failed += 1
            print("FAILED", name, repr(error), flush=True)
    code = server.stop()
    if code != 0:
        failed += 1
        print(f"FAILED lily-server ended with {code} after SIGTERM:\n" + "".join(server.log))
    print(f"{len(checks) + 1 - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)
