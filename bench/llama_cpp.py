"""Lily and llama.cpp on the same machine, in the same run, one after the other.

    python3 bench/llama_cpp.py --llama-bench build/bin/llama-bench --gguf full.gguf \\
        --lily target/release/lily --checkpoint full --json speed.json

Each round measures both engines, and which comes first alternates. Every process finds its own weights in the
page cache and the other's evicted, since the two files of 19.5 GB do not fit a machine of 24 GB together. How the
cache is filled matters: see `warm`. Where the system gives cold pages of the cache back although memory is free (DAMON's
`pageout`), `--memory DIR` has the weights in a file system in memory instead. Where the cores are virtual, `--awake` keeps
them from halting: see `keep_awake`. Prints a Markdown table; `--json` also keeps every sample. Linux only.
"""

import argparse
import datetime
import json
import mmap
import os
import platform
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAGE = 4096
# Bytes that are touched by one call into C, whose result holds a byte for each page.
STRETCH = 256 << 20
# Prompt of the runs that time a whole process: a short question.
START_PROMPT = 32
# Tokens that llama.cpp reads before its first prefill that counts.
WARM_UP = 128
WARMING = (
    "Before every process all of its weights are brought into the page cache, by touching each page through a "
    "mapping with MADV_HUGEPAGE, and the other engine's weights are evicted (POSIX_FADV_DONTNEED)."
)


IN_MEMORY = (
    "Weights are copied into a file system in memory before every process that reads them in place; llama.cpp's others "
    "make a copy of their own, for which there would be no room, and read the disk."
)


def evict(files):
    """Drops `files` from the page cache."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # Pages that were never written to the disk would stay.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(files):
    """Brings `files` into the page cache and returns how many of their bytes a mapping then has in huge pages.

    The page cache keeps a file in the units in which it was first read. A plain read makes small ones, and then
    no mapping gets huge pages afterwards, whatever it asks for. So the first to read is a mapping that asks.
    """
    huge = 0
    for path in files:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            mapping.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, len(mapping), STRETCH):
                mapping[start : min(start + STRETCH, len(mapping)) : PAGE]
            huge += huge_bytes(path)
    return huge


def huge_bytes(path):
    """Bytes of this process's mapping of `path` that are in huge pages."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:  # "from-to permissions offset device inode path"
            inside = rest.endswith(str(path))
        elif inside and name == "FilePmdMapped:":
            total += int(rest.split()[0]) << 10
    return total


def keep_awake():
    """Has a process of idle priority spin on each core until this one ends.

    A host may place a virtual core anew when it wakes up, and two that share a way to the memory read little more than one.
    Cores that never halt stay where they are more often, so that both engines find the same machine.
    """
    parent = os.getpid()
    for core in os.sched_getaffinity(0):
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends with its parent, without a word.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(0, {core})
            while os.getppid() == parent:
                for _ in range(1_000_000):
                    pass
            os._exit(0)


def run(command):
    """Runs `command`: what it printed as JSON, and what it took of time, memory and disk."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode != 0:
            sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{errors.read()[-2000:]}")
        return {
            "seconds": seconds,
            "peak_resident_bytes": usage.ru_maxrss << 10,
            "disk_read_bytes": usage.ru_inblock * 512,
            "printed": json.load(out),
        }


class Lily:
    name = "Lily"

    def __init__(self, args):
        self.files = sorted(args.checkpoint.resolve().glob("*.safetensors"))
        self.bench = [str(args.lily.resolve()), "bench", "--model-path", str(args.checkpoint), "--json"]
        self.bench += ["--repeat", "1", "--threads", str(args.threads)]
        lengths = ["--prompt", joined(args.prompt), "--depth", joined(args.depth), "--gen", str(args.gen)]
        once = ["--prompt", str(START_PROMPT), "--gen", "0", "--no-warmup", "--no-floor"]
        self.commands = {"start": self.bench + once, "speed": self.bench + lengths}
        self.place, self.in_place = args.checkpoint, self.commands.keys()

    @staticmethod
    def samples(runs):
        """Each measurement's value, in tokens per second or seconds, by name."""
        report = runs["speed"]["printed"]
        values = {prefill_name(p["tokens"]): p["tokens_per_second"]["median"] for p in report["prefill"]}
        values |= {decode_name(d["depth"]): d["tokens_per_second"]["median"] for d in report["decode"]}
        return values | dict.fromkeys((START, START_IN_PLACE), runs["start"]["seconds"])

    @staticmethod
    def fractions(runs):
        """Each speed as a part of what the machine can do at the most, by name."""
        report = runs["speed"]["printed"]
        floors = {prefill_name(p["tokens"]): p["floor"] for p in report["prefill"]}
        floors |= {decode_name(d["depth"]): d["floor"] for d in report["decode"]}
        return {name: floor["fraction"] for name, floor in floors.items() if floor}


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, args):
        self.files = [args.gguf.resolve()]
        bench = [str(args.llama_bench.resolve()), "-m", str(args.gguf), "-o", "json", "-r", "1"]
        bench += ["-t", str(args.threads)] + shlex.split(args.llama_args)
        # Depths apply to prefill too, so that it takes two processes.
        start = bench + ["-p", str(START_PROMPT), "-n", "0", "--no-warmup"]
        self.commands = {
            "start": start,
            # The first length only touches the weights: a warm-up of llama-bench's own would repeat every length.
            "prefill": bench + ["-p", joined([WARM_UP, *args.prompt]), "-n", "0", "--no-warmup"],
            "decode": bench + ["-p", "0", "-n", str(args.gen), "-d", joined(args.depth)],
        }
        if "--repack" not in bench:
            # Its own copy of the weights takes the page cache's memory and part of the start.
            self.commands["start in place"] = start + ["--repack", "0"]
        self.place, self.in_place = args.gguf, {"start in place"}

    @staticmethod
    def samples(runs):
        """As of Lily."""
        values = {prefill_name(row["n_prompt"]): row["avg_ts"] for row in runs["prefill"]["printed"][1:]}
        values |= {decode_name(row["n_depth"]): row["avg_ts"] for row in runs["decode"]["printed"]}
        starts = {START: "start", START_IN_PLACE: "start in place"}
        return values | {name: runs[run]["seconds"] for name, run in starts.items() if run in runs}


START = f"start, prompt of {START_PROMPT}, end"
START_IN_PLACE = f"{START} (llama.cpp with --repack 0)"


def prefill_name(tokens):
    return f"prefill, {tokens} tokens"


def decode_name(depth):
    return f"decode, context {depth}"


def joined(numbers):
    return ",".join(map(str, numbers))


def copied(place, to):
    """Copies the weights `place`, a file or a directory, into `to`: where they are then, and their bytes in huge pages."""
    huge = lambda: int(Path("/proc/meminfo").read_text().split("ShmemHugePages:")[1].split()[0]) << 10
    before, target = huge(), to / place.resolve().name
    (shutil.copytree if place.is_dir() else shutil.copyfile)(place, target)
    return target, huge() - before


def removed(target):
    """Removes what `copied` made."""
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def measure(engine, other, memory):
    """One engine's part of a round."""
    evict(other.files)
    runs, copy = {}, None
    try:
        for name, command in engine.commands.items():
            if memory and name in engine.in_place:
                copy = copy or copied(engine.place, memory)
                huge = copy[1]
                command = [str(copy[0]) if part == str(engine.place) else part for part in command]
                evict(engine.files)
            else:
                huge = warm(engine.files)
            print(f"{engine.name}: {name}", file=sys.stderr, flush=True)
            runs[name] = run(command) | {"huge_page_bytes": huge}
    finally:
        if copy:
            removed(copy[0])
    result = {"samples": engine.samples(runs), "runs": runs}
    return result | ({"fractions": engine.fractions(runs)} if engine.name == Lily.name else {})


def machine():
    """What the figures depend on, as the system tells it."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory = Path("/proc/meminfo").read_text().split()
    return {
        "cpu": cpu.partition(":")[2].strip(),
        "cpus": os.cpu_count(),
        "memory_bytes": int(memory[memory.index("MemTotal:") + 1]) << 10,
        "system": f"{platform.system()} {platform.release()}",
        "transparent_hugepage": Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip(),
    }


def spread(values, digits):
    middle, low, high = (f"{f(values):,.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def table(rounds):
    """The Markdown table: medians with the lowest and the highest sample."""
    of = lambda engine, name: [r[engine]["samples"][name] for r in rounds]
    lines = [
        "| median (lowest to highest) | Lily | llama.cpp | Lily against llama.cpp | Lily against the limit |",
        "|---|---|---|---|---|",
    ]
    # Decode, prefill, start; those that both have.
    names = sorted(rounds[0][LlamaCpp.name]["samples"], key=lambda name: name.split(",")[0])
    for name in names:
        lily, llama = of(Lily.name, name), of(LlamaCpp.name, name)
        ratio = statistics.median(lily) / statistics.median(llama)
        if name in (START, START_IN_PLACE):
            unit, digits, against = "s", 2, f"{1 / ratio:.2f}x sooner"
        else:
            unit, digits, against = "tokens/s", 1, f"{ratio:.2f}x"
        fractions = [100 * r[Lily.name]["fractions"][name] for r in rounds if name in r[Lily.name]["fractions"]]
        limit = f"{spread(fractions, 1)} %" if fractions else ""
        lines.append(f"| {name}, {unit} | {spread(lily, digits)} | {spread(llama, digits)} | {against} | {limit} |")
    return "\n".join(lines)


def limits(rounds):
    """The sentence about what the machine can do at the most."""
    measured = [r[Lily.name]["runs"]["speed"]["printed"]["limits"] for r in rounds]
    sentence = f"Measured limits: a plain read {spread([l['read_bytes_per_second'] / 1e9 for l in measured], 1)} GB/s"
    peaks = [l["matrix_ops_per_second"] / 1e9 for l in measured if l["matrix_ops_per_second"]]
    return sentence + (f", byte dot products {spread(peaks, 0)} GOP/s." if peaks else ".")


def memory(rounds):
    """The sentences about memory, the page cache, and the time to the first token by Lily's own clock."""
    runs = lambda engine: [run for r in rounds for run in r[engine]["runs"].values()]
    # Lily's own count, as the process also measured the limits, which takes memory.
    lily = max(run["printed"]["memory"]["peak_resident_bytes"] for run in runs(Lily.name)) / 1e9
    llama = max(run["peak_resident_bytes"] for run in runs(LlamaCpp.name)) / 1e9
    first = [r[Lily.name]["runs"]["start"]["printed"]["start"]["first_token_seconds"] for r in rounds]
    huge = lambda engine: statistics.median(run["huge_page_bytes"] for run in runs(engine)) / 1e9
    disk = lambda engine: max(run["disk_read_bytes"] for run in runs(engine)) / 1e9
    return (
        f"Resident at the peak, mapped files included: Lily {lily:.1f} GB, llama.cpp {llama:.1f} GB. Lily's first "
        f"token came {spread(first, 2)} s after the start. Of the warm weights, Lily's lay in huge pages to "
        f"{huge(Lily.name):.1f} GB, llama.cpp's to {huge(LlamaCpp.name):.1f} GB (median); at the most, a process of "
        f"Lily's read {disk(Lily.name):.1f} GB from the disk again, one of llama.cpp's {disk(LlamaCpp.name):.1f} GB."
    )


def numbers(text):
    return [int(number) for number in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--llama-bench", type=Path, required=True, metavar="FILE", help="the program llama-bench")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="its weights")
    parser.add_argument("--lily", type=Path, required=True, metavar="FILE", help="the program lily, release build")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="its weights")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of both")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--prompt", type=numbers, default=[512, 2048], metavar="N,…", help="lengths for prefill")
    parser.add_argument("--depth", type=numbers, default=[128, 4096], metavar="N,…", help="contexts for decode")
    parser.add_argument("--gen", type=int, default=32, metavar="N", help="tokens decoded in a run")
    parser.add_argument("--llama-args", default="", metavar="WORDS", help="more for llama-bench, as in a shell")
    parser.add_argument("--memory", type=Path, metavar="DIR", help="a directory of a file system in memory, with 20 GB of room")
    parser.add_argument("--awake", action="store_true", help="keep virtual cores from halting")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where every sample goes, after each round")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    for path in (args.llama_bench, args.gguf, args.lily, args.checkpoint, args.memory):
        if path and not path.exists():
            parser.error(f"{path} does not exist")
    return args


def main():
    args = arguments()
    engines = [Lily(args), LlamaCpp(args)]
    if not engines[0].files:
        sys.exit(f"there are no .safetensors files in {args.checkpoint}")
    result = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": machine(),
        "page_cache": IN_MEMORY if args.memory else WARMING,
        "awake": args.awake,
        "commands": {engine.name: {k: shlex.join(c) for k, c in engine.commands.items()} for engine in engines},
        "weight_bytes": {engine.name: sum(f.stat().st_size for f in engine.files) for engine in engines},
        "rounds": [],
    }
    evict([path for engine in engines for path in engine.files])
    if args.awake:
        keep_awake()
    for index in range(args.rounds):
        print(f"round {index + 1} of {args.rounds}", file=sys.stderr, flush=True)
        first, second = engines if index % 2 == 0 else engines[::-1]
        entry = {"first": first.name, "load_average": os.getloadavg()}
        entry[first.name] = measure(first, second, args.memory)
        entry[second.name] = measure(second, first, args.memory)
        result["rounds"].append(entry)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    print("\n\n".join([table(result["rounds"]), limits(result["rounds"]), memory(result["rounds"])]))


if __name__ == "__main__":
    main()
