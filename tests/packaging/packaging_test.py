"""What the packages hold, and that they work: the wheel in a fresh environment, what `install.sh` installs, the service of
systemd, the agent of launchd.

    python3 tests/packaging/packaging_test.py target/debug WHEEL

The first is the folder of the programs that were built. `tests/packaging/image.sh` and `unit.sh` run the image and the
service; `crates/cli/tests/shown_commands.rs` looks at the flags that all of these start the programs with.
"""

import os
import plistlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = {"lily", "lily-server"}
# How far the service may be exposed by the reckoning of systemd-analyze, in tenths of ten.
MOST_EXPOSURE = 20


def text(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def run(*command, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def answers(lily):
    """That a program of this path is this version, and knows what the demo knows."""
    version = re.search(r'^version = "(.*)"', text("Cargo.toml"), re.M)[1]
    assert run(lily, "--version").strip() == f"lily {version}"
    assert run(lily, "chat", "What is 17 + 25?", stdin=subprocess.DEVNULL) == "42\n"


def wheel_in_a_fresh_environment(programs, wheel, folder):
    """`pip install` of the wheel gives both programs, which need no Python."""
    tag = os.path.basename(wheel).removesuffix(".whl").split("-", 2)[2]
    assert tag.startswith("py3-none-"), tag
    assert sys.platform != "linux" or tag.endswith(f"-linux_{os.uname().machine}"), f"{tag} promises other systems"
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    scripts = {os.path.basename(name) for name in names if ".data/scripts/" in name}
    assert scripts == PROGRAMS, scripts
    assert any(name.endswith("LICENSE") for name in names), names
    run(sys.executable, "-m", "venv", folder)
    run(f"{folder}/bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", wheel)
    answers(f"{folder}/bin/lily")
    assert run(f"{folder}/bin/lily-server", "--version").startswith("lily-server ")


def installed_files(programs, wheel, folder):
    """`install.sh` installs programs, a manual page for each command, and completions of three shells."""
    run("sh", f"{ROOT}/packaging/install.sh", "/usr", programs, env={**os.environ, "DESTDIR": folder})
    answers(f"{folder}/usr/bin/lily")
    commands = re.findall(r"^  ([a-z-]+) ", run(f"{folder}/usr/bin/lily", "--help"), re.M)
    assert len(commands) > 10, commands
    pages = set(os.listdir(f"{folder}/usr/share/man/man1"))
    for command in [*commands, "server"]:
        assert command == "help" or f"lily-{command}.1" in pages, (command, pages)
    for path, shells in {
        "bash-completion/completions": ["lily", "lily-server"],
        "zsh/site-functions": ["_lily", "_lily-server"],
        "fish/vendor_completions.d": ["lily.fish", "lily-server.fish"],
    }.items():
        for name in shells:
            with open(f"{folder}/usr/share/{path}/{name}", encoding="utf-8") as file:
                assert "ctx-len" in file.read(), name


def agent_of_launchd(programs, wheel, folder):
    """The plist is one, of the keys and types that launchd knows, and nothing in it is left to be replaced."""
    name = "lily.server.plist"
    agent = plistlib.loads(text(f"packaging/{name}").replace("@HOME@", folder).encode())
    assert agent["Label"] == name.removesuffix(".plist")
    assert os.path.basename(agent["ProgramArguments"][0]) in PROGRAMS
    assert agent["KeepAlive"] == {"SuccessfulExit": False} and agent["RunAtLoad"] is True
    assert agent["ExitTimeOut"] > 10 and agent["Umask"] == 0o077
    kinds = {"Label": str, "ProgramArguments": list, "RunAtLoad": bool, "KeepAlive": dict, "ThrottleInterval": int,
             "ExitTimeOut": int, "ProcessType": str, "SoftResourceLimits": dict, "Umask": int, "StandardOutPath": str,
             "StandardErrorPath": str}
    assert {key: type(value) for key, value in agent.items()} == kinds
    assert "@" not in str(agent)


def service_of_systemd(programs, wheel, folder):
    """systemd takes the service, with and without the parts for cards and for keys, and finds it hardly exposed."""
    started = os.path.join(os.path.abspath(programs), "lily-server")
    shutil.copyfile(f"{ROOT}/packaging/lily.service", f"{folder}/lily.service")
    with open(f"{folder}/lily.service", encoding="utf-8") as file:
        unit = file.read()
    with open(f"{folder}/lily.service", "w", encoding="utf-8") as file:
        file.write(unit.replace("/usr/local/bin/lily-server", started))
    parts = f"{folder}/lily.service.d"
    os.mkdir(parts)
    for part in [None, "keys.conf", "nvidia.conf"]:
        if part:
            shutil.copyfile(f"{ROOT}/packaging/{part}", f"{parts}/{part}")
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", f"{folder}/lily.service"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), (part, done)
    run("systemd-analyze", "security", "--no-pager", "--offline=yes", f"--threshold={MOST_EXPOSURE}", f"{folder}/lily.service")


def main():
    programs, wheel = sys.argv[1:]
    checks = [wheel_in_a_fresh_environment, installed_files, agent_of_launchd]
    if shutil.which("systemd-analyze"):
        checks.append(service_of_systemd)
    failed = 0
    for check in checks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(programs, wheel, folder)
                print("ok", check.__name__, flush=True)
            except (AssertionError, OSError, KeyError, plistlib.InvalidFileException) as error:
                failed += 1
                print("FAILED", check.__name__, error, flush=True)
    print(f"{len(checks) - failed} passed, {failed} failed")
    if service_of_systemd not in checks:
        print("NOT EXECUTED: packaging/lily.service was not shown to systemd: there is no systemd-analyze")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
