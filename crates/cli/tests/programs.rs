//! `lily` as a person meets it: good answers on standard output, one sentence for what goes wrong.

#[path = "support/process.rs"]
mod process;

use std::io::Write;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use process::{lily, run, text};

/// The one line that a failing program leaves, and its exit code.
fn failure(command: &mut Command) -> (Option<i32>, String) {
    let output = run(command);
    assert_eq!(text(&output.stdout), "");
    let stderr = text(&output.stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
    (output.status.code(), stderr)
}

#[test]
fn a_question_can_come_from_standard_input() {
    let mut chat = lily(&["chat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("lily starts");
    chat.stdin.take().expect("stdin is piped").write_all(b"What is 17 + 25?\n").expect("lily reads");
    let output = chat.wait_with_output().expect("lily ends");
    assert_eq!(text(&output.stdout), "42\n");
}

#[test]
fn thinking_stays_out_of_what_another_program_reads() {
    let output = run(&mut lily(&["chat", "--think", "What is 17 + 25?"]));
    assert_eq!(text(&output.stdout), "42\n");
}

#[test]
fn what_memory_the_model_takes_is_said_where_figures_are_asked_for() {
    let output = run(&mut lily(&["chat", "--stats", "--ctx-len", "2048", "What is 17 + 25?"]));
    assert_eq!(text(&output.stdout), "42\n");
    let stderr = text(&output.stderr);
    let line = stderr.lines().find(|line| line.contains("of weights mapped")).expect("a line about memory");
    assert!(line.starts_with("lily: 0.01 GB") && line.contains("of its own for 2048 tokens"), "{line}");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut chat = lily(&["chat", "Tell me a story."])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("lily starts");
    drop(chat.stdout.take());
    let output = chat.wait_with_output().expect("lily ends");
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(!stderr.contains("panicked") && !stderr.contains("pipe"), "{stderr}");
}

#[test]
fn what_goes_wrong_is_one_sentence_and_exit_code_1() {
    let empty = tempfile::tempdir().expect("a directory");
    let empty = empty.path().to_str().expect("a plain path");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let cases: &[(&[&str], &str)] = &[
        (&["chat", "hi", "--model-path", "/no/such/folder"], "/no/such/folder"),
        (&["chat", "hi", "--model-path", empty], "config.json"),
        (&["chat", "hi", "--ctx-len", "99999999"], "--ctx-len"),
        (&["chat", "hi", "--ctx-len", "8"], "the context holds 8"),
        (&["chat", "hi", "--top-p", "7"], "top_p"),
        (&["serve", "--port", &port], "--port"),
        (&["demo-score", "--heldout", "/no/such/file"], "--heldout"),
        (&["synth", "--out", empty, "--layers", "6"], "--layers"),
        (&["bench", "--prompt", "99999999"], "--prompt 99999999"),
        (&["bench", "--prompt", "64", "--depth", "100", "--ctx-len", "100"], "--depth 100"),
        (&["bench", "--prompt", "0", "--gen", "0"], "nothing to measure"),
        #[cfg(not(target_os = "macos"))]
        (&["chat", "hi", "--backend", "metal"], "Metal needs macOS"),
        // With a driver or without one.
        (&["chat", "hi", "--backend", "cuda", "--device", "99"], "driver"),
        (&["chat", "hi", "--backend", "cpu", "--gpu-memory", "24GB"], "--gpu-memory"),
        (&["plan", "--backend", "cuda", "--batch", "33"], "--batch 33"),
        (&["plan", "--backend", "cuda", "--context", "999999"], "--context 999999"),
        (&["plan", "--backend", "cuda", "--prefill", "9000"], "--prefill 9000"),
        (&["plan", "--backend", "metal", "--prefill", "999999"], "--prefill 999999"),
        (&["plan", "--backend", "metal", "--prefill", "50", "--context", "20"], "--context 20"),
        (&["plan", "--backend", "metal", "--dot", "/no/such/folder/out.dot"], "--dot"),
        (&["bench", "--plot", "/no/such/folder/out.svg"], "--plot"),
    ];
    for &(args, names) in cases {
        let (code, stderr) = failure(&mut lily(args));
        assert_eq!(code, Some(1), "{args:?}: {stderr}");
        let sentence = stderr.lines().last().expect("a sentence");
        assert!(sentence.starts_with("lily: ") && sentence.contains(names), "{args:?}: {stderr}");
    }
}

#[test]
fn the_plan_of_a_token_is_printed_without_a_gpu() {
    let folder = tempfile::tempdir().expect("a directory");
    let dot = folder.path().join("plan.dot");
    let flags =
        ["plan", "--backend", "cuda", "--context", "4096", "--dot", dot.to_str().expect("a plain path")];
    let printed = text(&run(&mut lily(&flags)).stdout);
    for part in ["one step of 1 sequence at context 4096", "253 kernels", "delta_core", "over the floor"] {
        assert!(printed.contains(part), "{part} in:\n{printed}");
    }
    let graph = std::fs::read_to_string(dot).expect("the graph was written");
    assert!(graph.starts_with("digraph") && graph.matches(" -> ").count() >= 252, "{graph}");
}

/// The names of all stages.
fn stages() -> impl Iterator<Item = &'static str> {
    lily_gpu::stage::Stage::ALL.into_iter().map(|stage| stage.name())
}

#[test]
fn the_plan_of_a_prompt_has_both_floors_of_every_stage() {
    let flags = ["plan", "--backend", "cuda", "--prefill", "512", "--context", "4096"];
    let printed = text(&run(&mut lily(&flags)).stdout);
    for part in
        ["512 tokens of a prompt after 3584 others", "dependencies", "GFLOP", "for bytes", "for operations"]
    {
        assert!(printed.contains(part), "{part} in:\n{printed}");
    }
    for stage in stages() {
        let line = printed.lines().find(|line| line.split_whitespace().next() == Some(stage));
        let fields = line.map(|line| line.split_whitespace().count());
        assert_eq!(fields, Some(6), "{stage} in:\n{printed}");
    }
    assert!(!printed.to_lowercase().contains("estimate"), "{printed}");
}

#[test]
fn metal_says_how_prompts_are_cut_and_that_estimates_are_not_measured() {
    let prompt = text(&run(&mut lily(&["plan", "--backend", "metal", "--prefill", "3000"])).stdout);
    let token = text(&run(&mut lily(&["plan", "--backend", "metal"])).stdout);
    for part in ["2 passes of at most 2048 tokens", "868 kernels", "of 32 in those of the experts", "GFLOP"] {
        assert!(prompt.contains(part), "{part} in:\n{prompt}");
    }
    for printed in [prompt, token] {
        assert!(stages().all(|stage| printed.contains(stage)), "{printed}");
        let (_, estimates) = printed.split_once("Estimate, not measured").expect("a label");
        for chip in ["M1 Max", "M2 Ultra", "M3 Max", "M4 Max", "M5 Max"] {
            assert!(estimates.contains(chip), "{chip} in:\n{printed}");
        }
    }
}

#[test]
fn a_plan_for_keys_and_values_in_8_bits_says_so_and_moves_less() {
    let plan = |backend: &str, kv: &str, more: &[&str]| {
        let args = [&["plan", "--backend", backend, "--kv-cache-type", kv][..], more].concat();
        text(&run(&mut lily(&args)).stdout)
    };
    // A prompt on CUDA unpacks what it reads.
    for (backend, more) in [
        ("metal", &["--context", "100000"][..]),
        ("metal", &["--prefill", "3000"]),
        ("cuda", &["--context", "100000"]),
    ] {
        let [halves, bytes] = ["f16", "q8"].map(|kv| plan(backend, kv, more));
        assert!(bytes.contains("keys and values in 8 bits") && !halves.contains("8 bits"), "{bytes}");
        let megabytes = |printed: &str| -> f64 {
            let line = printed.lines().find(|line| line.starts_with("attn_core")).unwrap();
            line.split_whitespace().nth(2).unwrap().parse().unwrap()
        };
        assert!(megabytes(&bytes) < megabytes(&halves), "{bytes}");
    }
}

#[test]
fn a_wrong_flag_is_exit_code_2() {
    for args in [
        &["chat", "--no-such-flag"][..],
        &["chat", "--threads", "0"],
        &["bench", "--prompt", "many"],
        &["bench", "--repeat", "0"],
        &["plan", "--backend", "cuda", "--prefill", "0"],
        &["plan", "--backend", "cuda", "--prefill", "64", "--batch", "2"],
        &["no-such-command"],
    ] {
        assert_eq!(failure(&mut lily(args)).0, Some(2), "{args:?}");
    }
}
