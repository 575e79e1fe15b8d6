//! A user with a slow line fetches a model: what goes wrong is told with what to do, and no byte is fetched twice.

#[path = "../../hub/tests/support/fake_hub.rs"]
mod fake_hub;
#[path = "support/process.rs"]
mod process;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fake_hub::{COMMIT, FakeHub, Fault};
use lily_model::demo;
use process::{lily, run, text};

const REPO: &str = "lily/Demo-4bit";
const WEIGHTS: &str = "model.safetensors";
/// Files from this size on lie behind a redirect.
const LARGE: usize = 1 << 20;
/// Longest wait for something that must happen soon; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The demo as a repository, with things that nobody needs.
fn fake() -> FakeHub {
    let others: [(&str, &[u8]); 2] = [("README.md", b"words"), ("pytorch_model.bin", b"pickles")];
    let files: Vec<(&str, &[u8])> = demo::FILES.iter().copied().chain(others).collect();
    FakeHub::start(REPO, &files, LARGE)
}

fn weights() -> &'static [u8] {
    demo::FILES.iter().find(|(name, _)| *name == WEIGHTS).expect("the demo has weights").1
}

/// A command with the environment of a user whose files go to `home`.
fn at_home(mut command: Command, fake: &FakeHub, home: &Path) -> Command {
    for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"] {
        command.env_remove(name);
    }
    for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(name);
    }
    command.env("HF_HOME", home).env("HF_ENDPOINT", fake.endpoint());
    command
}

fn pull(fake: &FakeHub, home: &Path) -> Output {
    run(&mut at_home(lily(&["pull", REPO, "--retries", "0"]), fake, home))
}

fn incomplete(fake: &FakeHub, home: &Path) -> PathBuf {
    let name = format!("{}.incomplete", fake.etag(WEIGHTS));
    home.join("hub/models--lily--Demo-4bit/blobs").join(name)
}

/// The sentence that a pull failed with.
fn sentence(output: &Output) -> String {
    let stderr = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{stderr}");
    stderr.lines().last().expect("a sentence").to_owned()
}

fn snapshot(home: &Path) -> PathBuf {
    home.join("hub/models--lily--Demo-4bit/snapshots").join(COMMIT)
}

#[test]
fn two_lost_connections_and_a_full_disk_are_told_and_cost_no_byte() {
    let fake = fake();
    let home = tempfile::tempdir().unwrap();
    let home = home.path();

    fake.fail(WEIGHTS, &[Fault::Break(1_000_000), Fault::Break(2_000_000)]);
    for megabytes in [1, 3] {
        let sentence = sentence(&pull(&fake, home));
        assert!(sentence.contains(&format!("lost at {megabytes}.0 MB of ")), "{sentence}");
        assert!(sentence.contains("run the same command again"), "{sentence}");
        assert_eq!(fs::metadata(incomplete(&fake, home)).unwrap().len(), megabytes * 1_000_000);
    }

    // A limit on files stands for a full disk: the write fails at that byte. Blocks are of 512 or of 1024 bytes.
    #[cfg(unix)]
    {
        let command =
            format!("trap '' XFSZ; ulimit -f 8000; exec {} pull {REPO}", env!("CARGO_BIN_EXE_lily"));
        let mut shell = Command::new("sh");
        shell.args(["-c", &command]).stdin(Stdio::null());
        let sentence = sentence(&run(&mut at_home(shell, &fake, home)));
        assert!(sentence.contains("disk is full") && sentence.contains("make room"), "{sentence}");
    }
    let here = fs::metadata(incomplete(&fake, home)).unwrap().len();
    assert!(here >= 3_000_000 && here < weights().len() as u64, "{here}");

    let output = pull(&fake, home);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim_end(), snapshot(home).to_str().unwrap());
    assert!(fs::read(snapshot(home).join(WEIGHTS)).unwrap() == weights(), "the weights have other bytes");
    assert!(!snapshot(home).join("README.md").exists() && !snapshot(home).join("pytorch_model.bin").exists());
    let asked = fake.asked(WEIGHTS);
    assert_eq!(
        asked,
        if cfg!(unix) { vec![0, 1_000_000, 3_000_000, here] } else { vec![0, 1_000_000, 3_000_000] }
    );

    // All is here: nobody is asked for the model's sake.
    let before = fake.requests();
    let output = run(&mut at_home(lily(&["chat", "--model-path", REPO, "What is 17 + 25?"]), &fake, home));
    assert_eq!(text(&output.stdout), "42\n", "{}", text(&output.stderr));
    assert_eq!(fake.requests(), before);
    let mut offline = at_home(lily(&["pull", REPO]), &fake, home);
    let output = run(offline.env("HF_HUB_OFFLINE", "1"));
    assert_eq!(text(&output.stdout).trim_end(), snapshot(home).to_str().unwrap());
    let mut nowhere = at_home(lily(&["pull", REPO, "--retries", "0"]), &fake, home);
    assert!(run(nowhere.env("HF_ENDPOINT", "http://127.0.0.1:1")).status.success());
}

#[test]
fn what_a_killed_pull_fetched_is_there_for_the_chat_that_names_the_repository() {
    let fake = fake();
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fake.fail(WEIGHTS, &[Fault::Hang(2_500_000)]);
    let mut command = at_home(lily(&["pull", REPO]), &fake, home);
    let mut process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while fs::metadata(incomplete(&fake, home)).map_or(0, |meta| meta.len()) < 2_500_000 {
        assert!(start.elapsed() < PATIENCE, "the bytes do not come");
        std::thread::sleep(Duration::from_millis(10));
    }
    // SIGKILL, on systems that have it.
    process.kill().unwrap();
    process.wait().unwrap();

    let output = run(&mut at_home(lily(&["chat", "--model-path", REPO, "What is 17 + 25?"]), &fake, home));
    assert_eq!(text(&output.stdout), "42\n", "{}", text(&output.stderr));
    assert_eq!(fake.asked(WEIGHTS), [0, 2_500_000]);
}

#[test]
fn what_cannot_be_fetched_is_one_sentence() {
    let fake = fake();
    let home = tempfile::tempdir().unwrap();
    let fails = |args: &[&str], variable: (&str, &str)| {
        let mut command = at_home(lily(args), &fake, home.path());
        sentence(&run(command.env(variable.0, variable.1)))
    };
    let none = ("LILY_UNUSED", "");
    assert!(fails(&["pull", "no-repository"], none).contains("OWNER/NAME"));
    assert!(fails(&["pull", "lily/other"], none).contains("has no model lily/other"));
    let sentence = fails(&["chat", "hi", "--model-path", "lily/other"], none);
    assert!(sentence.contains("there is no directory lily/other, and as a repository"), "{sentence}");
    let nowhere = ("HF_ENDPOINT", "http://127.0.0.1:1");
    assert!(fails(&["pull", REPO, "--retries", "0"], nowhere).contains("cannot be reached"));
    assert!(fails(&["pull", REPO], ("HF_HUB_OFFLINE", "1")).contains("HF_HUB_OFFLINE"));
    assert!(fails(&["pull", REPO], ("HF_ENDPOINT", "hub")).contains("HF_ENDPOINT"));
    fake.require_token("hf_secret");
    assert!(fails(&["pull", REPO], none).contains("HF_TOKEN"));
}
