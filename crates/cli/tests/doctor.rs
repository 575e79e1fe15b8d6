//! `lily doctor`: a page for people, JSON and an exit code for scripts.

#[path = "support/process.rs"]
mod process;

use process::{lily, run, text};
use serde_json::Value;

/// `lily doctor` of a user who has fetched nothing.
fn without_a_model(args: &[&str]) -> std::process::Command {
    let mut command = lily(args);
    at_no_home(&mut command);
    command
}

fn at_no_home(command: &mut std::process::Command) {
    command.env_remove("HF_HUB_CACHE").env("HF_HOME", "/no/models/here");
}

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../demo/checkpoint");

#[test]
fn a_model_that_runs_here_is_exit_code_0_and_json_for_scripts() {
    let output = run(&mut lily(&["doctor", "--model-path", DEMO, "--ctx-len", "2048", "--json"]));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(output.status.success(), "{report:#}");
    assert_eq!(report["problems"], serde_json::json!([]));
    let backends = report["backends"].as_array().expect("a list");
    let cpu = backends.iter().find(|backend| backend["name"] == "cpu").expect("there is a processor");
    assert!(cpu["works"] == true && cpu["room"]["fits"] == true, "{cpu}");
    assert!(backends.iter().any(|backend| backend["name"] == "metal"), "{report:#}");
    assert_eq!(report["disk"], Value::Null);

    // What it says to run next runs.
    let next = report["next"].as_str().expect("a command");
    let words: Vec<&str> = next.split(' ').collect();
    assert_eq!(words[..2], ["lily", "chat"]);
    let output = run(lily(&words[1..]).arg("What is 17 + 25?"));
    assert_eq!(text(&output.stdout), "42\n");
}

#[test]
fn the_page_has_every_backend_with_its_reason() {
    let page = text(&run(&mut without_a_model(&["doctor"])).stdout);
    for part in
        ["Backends\n", " cpu ", " cuda ", " metal ", "--backend auto takes ", "Qwen3.6-35B-A3B", "\nNext: "]
    {
        assert!(page.contains(part), "{part:?} in:\n{page}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_stands_in_the_way_is_named_and_exit_code_1() {
    // Too few addresses for the weights of the full model, and enough for the program.
    let command = format!("ulimit -v 16000000; exec {} doctor", env!("CARGO_BIN_EXE_lily"));
    let mut shell = std::process::Command::new("sh");
    at_no_home(&mut shell);
    let output = run(shell.args(["-c", &command]));
    let page = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{page}");
    assert!(page.contains("\nIn the way\n") && page.contains("`ulimit -v unlimited`"), "{page}");
    assert!(text(&output.stderr).contains("named above"), "{}", text(&output.stderr));
}

/// At a context that is nearly all of what the model takes beside its weights.
#[test]
fn a_cache_of_8_bits_takes_about_half_of_the_memory() {
    let own = |kv: &str| {
        let flags = ["doctor", "--model-path", DEMO, "--ctx-len", "32768", "--json", "--kv-cache-type", kv];
        let report: Value = serde_json::from_slice(&run(&mut lily(&flags)).stdout).expect("JSON");
        assert_eq!(report["model"]["kv_cache_type"], kv);
        let says = report["backends"][0]["room"]["says"].as_str().expect("figures").to_owned();
        let (_, own) = says.split_once(", ").expect("weights, then the rest");
        own.split(' ').next().and_then(|gb| gb.parse::<f64>().ok()).expect("a figure")
    };
    // 67.1 MB of halves, or 34.1 MB of 8 bits and scales, and 32 MB that do not depend on it, to 10 MB each.
    let saved = own("f16") - own("q8");
    assert!((0.02..=0.04).contains(&saved), "{saved} GB");
    let output = run(&mut without_a_model(&["doctor", "--kv-cache-type", "q8"]));
    assert!(text(&output.stdout).contains("keys and values in 8 bits"));
}

#[test]
fn a_context_beyond_the_models_is_refused() {
    let output = run(&mut without_a_model(&["doctor", "--ctx-len", "999999999"]));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--ctx-len 999999999 is more than the 262144 tokens"));
}
