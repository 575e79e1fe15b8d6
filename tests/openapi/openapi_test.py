"""Drives `lily-server` with what `schemathesis` makes of its `/openapi.json`.

    python tests/openapi/openapi_test.py target/debug

Starts `lily-server` from that folder on a free port and sends to every operation of the document requests that the
document allows and such that it does not. Every answer must have a declared status, none of the server's own faults,
a declared media type and headers, and a body of the declared schema; methods that are not declared must be refused.
Then the server is stopped with SIGTERM, must end cleanly, and may not have said that a request panicked.

Which requests are made is fixed by the seed. What a document cannot say (that a tool's schema must be one that can be
enforced, that a token must be in the vocabulary) is refused with 400, so that not every allowed request succeeds.
"""

import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "clients"))

import lily_server

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
]
# Answers of a random prompt go on to the end of the context.
CONTEXT = "256"
# One: what makes the requests is not safe to use from two threads (a KeyError in hypothesis, once in six runs).
WORKERS = "1"
# Seconds; many times what all requests take, and so any one of them on a busy machine.
LIMIT = 600


def main():
    args, flags = lily_server.arguments(__doc__)
    server = lily_server.Server(args.programs, [*flags, "--ctx-len", CONTEXT])
    command = [os.path.join(os.path.dirname(sys.executable), "schemathesis"), "run", server.url.removesuffix("/v1") + "/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", "coverage", "--workers", WORKERS]
    command += ["--seed", "1", "--no-color", "--warnings", "off", "--request-timeout", str(LIMIT)]
    command += ["--suppress-health-check", "all", "--continue-on-failure"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            tested = subprocess.run(command, cwd=folder, check=False, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            server.process.kill()
            sys.exit(f"not done after {LIMIT} s; what lily-server said last:\n" + "".join(server.log[-50:]))
    code = server.stop()
    log = "".join(server.log)
    assert code == 0, f"lily-server ended with {code} after SIGTERM:\n{log}"
    assert "panicked" not in log, log
    sys.exit(tested.returncode)


if __name__ == "__main__":
    main()
