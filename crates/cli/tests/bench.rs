//! `lily bench` on the demo: the shape of what it reports. How fast it was is nobody's assertion.

#[path = "support/process.rs"]
mod process;

use process::{lily, run, text};
use serde_json::Value;

/// Small enough to take no time.
const SMALL: [&str; 9] = ["bench", "-p", "48,16", "-d", "8,40", "-n", "3", "-r", "3"];

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|number| number.as_f64().expect("a number")).collect()
}

fn lengths(entries: &Value, field: &str) -> Vec<u64> {
    entries.as_array().expect("a list").iter().map(|entry| entry[field].as_u64().expect("a length")).collect()
}

#[test]
fn json_has_every_run_and_what_it_comes_to() {
    let output = run(lily(&SMALL).args(["--no-floor", "--json"]));
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let report: Value = serde_json::from_str(&text(&output.stdout)).expect("JSON and nothing else");
    assert_eq!(report["model"], "lily-demo");
    assert!(report["backend"].as_str().expect("a name").starts_with("CPU"));
    assert!(report["start"]["load_seconds"].as_f64() < report["start"]["first_token_seconds"].as_f64());
    assert_eq!(lengths(&report["prefill"], "tokens"), [16, 48]);
    assert_eq!(lengths(&report["decode"], "depth"), [8, 40]);
    assert_eq!(lengths(&report["decode"], "tokens"), [3, 3]);
    for (part, length) in [("prefill", "tokens"), ("decode", "tokens")] {
        for entry in report[part].as_array().expect("a list") {
            let mut seconds = numbers(&entry["seconds"]);
            assert_eq!(seconds.len(), 3, "every run, the one to warm up left out");
            seconds.sort_by(f64::total_cmp);
            let tokens = entry[length].as_f64().expect("a length");
            let speed = &entry["tokens_per_second"];
            assert_eq!(speed["median"], tokens / seconds[1]);
            assert_eq!(speed["lowest"], tokens / seconds[2]);
            assert_eq!(speed["highest"], tokens / seconds[0]);
            assert_eq!(entry["floor"], Value::Null);
        }
    }
    let ops: Vec<u64> = lengths(&report["prefill"], "matrix_ops");
    let bytes: Vec<u64> = lengths(&report["decode"], "bytes_per_token");
    assert!(ops[0] < ops[1] && bytes[0] < bytes[1], "longer contexts cost more: {ops:?} {bytes:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_comes_in_its_parts() {
    let output = run(lily(&SMALL).args(["--no-floor", "--json"]));
    let report: Value = serde_json::from_str(&text(&output.stdout)).expect("JSON and nothing else");
    let memory = &report["memory"];
    let part = |name: &str| memory[name].as_u64().expect("bytes");
    let (own, mapped) = (part("resident_anonymous_bytes"), part("resident_mapped_bytes"));
    assert!(own > 0 && mapped > 0);
    assert!(part("peak_resident_bytes") >= own.max(mapped), "{memory}");
    assert!(report["machine"]["memory_bytes"].as_u64() > memory["peak_resident_bytes"].as_u64());
}

#[test]
fn the_table_and_the_picture_show_both_parts_under_their_limits() {
    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("out.svg");
    let output = run(lily(&SMALL).arg("--plot").arg(&plot));
    let (table, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    let first = table.lines().next().expect("a line");
    assert!(first.starts_with("lily-demo on CPU") && first.contains("threads"), "{table}");
    for heading in ["prefill", "decode at", "of limit", "memory: peak", "limits: memory read at"] {
        assert!(table.contains(heading), "{heading}: {table}");
    }
    let svg = std::fs::read_to_string(&plot).expect("the picture was written");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<svg").count(), 1);
    for words in ["lily-demo", "Prefill, tokens/s", "Decode, tokens/s", "limit: memory read", "prompt length"]
    {
        assert!(svg.contains(words), "{words}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "every place is a number");
}

#[test]
fn a_part_can_be_left_out_of_the_picture_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("out.svg");
    let flags = ["bench", "-p", "16", "-n", "0", "-r", "1", "--no-warmup", "--no-floor", "--plot"];
    let output = run(lily(&flags).arg(&plot));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("decode at"));
    assert!(std::fs::read_to_string(&plot).expect("the picture was written").contains("not measured"));
}

#[test]
fn a_profile_that_the_backend_cannot_give_is_said_to_be_missing() {
    let output = run(&mut lily(&[
        "bench",
        "-p",
        "0",
        "-d",
        "8",
        "-n",
        "2",
        "--repeat",
        "1",
        "--no-floor",
        "--profile",
    ]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("does not time its stages, so --profile added nothing"), "{stderr}");
    assert!(text(&output.stdout).contains("decode at") && !text(&output.stdout).contains("kernels"));
}

/// Waits until a process sees to Ctrl-C itself and has computed for so many seconds, by what the kernel tells of it.
#[cfg(target_os = "linux")]
fn wait_until_under_way(process: u32, seconds: u64) {
    use std::time::{Duration, Instant};

    /// The bit of SIGINT in a set of signals.
    const SIGINT: u64 = 1 << 1;
    /// What the kernel counts a process's time in.
    const TICKS_PER_SECOND: u64 = 100;
    /// Longest wait; only a failing test waits so long.
    const PATIENCE: Duration = Duration::from_secs(120);
    let file = |name: &str| std::fs::read_to_string(format!("/proc/{process}/{name}")).expect("it runs");
    let under_way = || {
        let status = file("status");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).expect("a set of signals");
        let caught = u64::from_str_radix(caught.trim(), 16).expect("it is in hexadecimal");
        // After the name: the state is the third field, times in user and in kernel mode are the 14th and 15th.
        let stat = file("stat");
        let (_, fields) = stat.rsplit_once(") ").expect("the name is in parentheses");
        let times = fields.split(' ').skip(11).take(2);
        let ticks: u64 = times.map(|ticks| ticks.parse::<u64>().expect("a count")).sum();
        caught & SIGINT != 0 && ticks >= seconds * TICKS_PER_SECOND
    };
    let start = Instant::now();
    while !under_way() {
        assert!(start.elapsed() < PATIENCE, "it computes nothing, or does not see to Ctrl-C");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Ctrl-C, as the terminal sends it.
#[cfg(target_os = "linux")]
#[test]
fn an_interrupt_ends_it_with_one_sentence() {
    use std::process::{Command, Stdio};

    let dir = tempfile::tempdir().expect("a directory");
    let plot = dir.path().join("out.svg");
    let bench = lily(&["bench", "-p", "4096", "-r", "1000", "--no-floor", "--plot"])
        .arg(&plot)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lily starts");
    // Far shorter than it would take.
    wait_until_under_way(bench.id(), 1);
    let sent = Command::new("kill").args(["-INT", &bench.id().to_string()]).status().expect("kill runs");
    assert!(sent.success());
    let output = bench.wait_with_output().expect("lily ends");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(text(&output.stdout), "");
    let stderr = text(&output.stderr);
    assert!(stderr.contains("lily: stopped before everything was measured"), "{stderr}");
    assert!(!plot.exists());
}
