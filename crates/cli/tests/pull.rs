//! A user with a slow line fetches a model: what goes wrong is told with what to do, and no byte is fetched twice.

#[path = "../../hub/tests/support/fake_hub.rs"]
mod fake_hub;
#[path = "support/process.rs"]
mod process;
#[path = "support/small_disk.rs"]
mod small_disk;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fake_hub::{COMMIT, FakeHub, Fault};
use lily_model::demo;
use process::{lily, run, text};
use small_disk::SmallDisk;

const LILY: &str = env!("CARGO_BIN_EXE_lily");
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

/// A pull during which the disk becomes full with something else: what it says, and the first byte that it asked for.
fn pull_while_the_disk_fills_up(fake: &FakeHub, disk: &SmallDisk, home: &Path) -> (Output, Vec<u64>) {
    const OTHER: &str = "README.md";
    // No byte comes before there is no room for it.
    fake.fail(WEIGHTS, &[Fault::After(OTHER)]);
    let mut command = at_home(disk.command(LILY, &["pull", REPO, "--retries", "0"]), fake, home);
    let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    let asked = loop {
        let asked = fake.asked(WEIGHTS);
        if !asked.is_empty() {
            break asked;
        }
        assert!(start.elapsed() < PATIENCE, "the weights are not asked for");
        std::thread::sleep(Duration::from_millis(10));
    };
    disk.fill(4_000_000);
    fake.ask(REPO, OTHER);
    (process.wait_with_output().unwrap(), asked)
}

/// The same where there is no such disk: a limit on files stands for one, the write fails at that byte. Blocks are of 512
/// or of 1024 bytes.
fn pull_within_a_limit(fake: &FakeHub, home: &Path) -> (Output, Vec<u64>) {
    let command = format!("trap '' XFSZ; ulimit -f 8000; exec {LILY} pull {REPO}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).stdin(Stdio::null());
    let output = run(&mut at_home(shell, fake, home));
    (output, fake.asked(WEIGHTS))
}

#[cfg(unix)]
#[test]
fn two_lost_connections_and_a_full_disk_are_told_and_cost_no_byte() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let disk = SmallDisk::mount(home, 24_000_000);
    let seen = disk.as_ref().map_or(home.to_owned(), SmallDisk::seen);
    let lily = |args: &[&str]| {
        let command = disk.as_ref().map_or_else(|| lily(args), |disk| disk.command(LILY, args));
        at_home(command, &fake, home)
    };
    let pull = || run(&mut lily(&["pull", REPO, "--retries", "0"]));
    let here = || fs::read(incomplete(&fake, &seen)).unwrap();

    fake.fail(WEIGHTS, &[Fault::Break(1_000_000), Fault::Break(2_000_000)]);
    for megabytes in [1, 3] {
        let sentence = sentence(&pull());
        assert!(sentence.contains(&format!("lost at {megabytes}.0 MB of ")), "{sentence}");
        assert!(sentence.contains("run the same command again"), "{sentence}");
        assert_eq!(here().len(), megabytes * 1_000_000);
    }
    assert_eq!(fake.asked(WEIGHTS), [0, 1_000_000]);

    let (output, asked) = match &disk {
        Some(disk) => {
            // What is seen to be too little before the first byte is said before it.
            disk.fill(4_000_000);
            let sentence = sentence(&pull());
            assert!(sentence.contains("9.4 MB") && sentence.contains("free"), "{sentence}");
            assert!(fake.asked(WEIGHTS).is_empty());
            disk.empty();
            pull_while_the_disk_fills_up(&fake, disk, home)
        }
        None => pull_within_a_limit(&fake, home),
    };
    let sentence = sentence(&output);
    assert!(sentence.contains("disk is full") && sentence.contains("make room"), "{sentence}");
    assert_eq!(asked, [3_000_000]);
    let fetched = here();
    assert!(fetched.len() > 3_000_000 && weights().starts_with(&fetched), "{} bytes are here", fetched.len());

    if let Some(disk) = &disk {
        disk.empty();
    }
    let output = pull();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim_end(), snapshot(home).to_str().unwrap());
    assert_eq!(fake.asked(WEIGHTS), [fetched.len() as u64]);
    assert!(fs::read(snapshot(&seen).join(WEIGHTS)).unwrap() == weights(), "the weights have other bytes");
    assert!(
        !snapshot(&seen).join("README.md").exists() && !snapshot(&seen).join("pytorch_model.bin").exists()
    );

    // All is here: nobody is asked for the model's sake.
    let before = fake.requests();
    let output = run(&mut lily(&["chat", "--model-path", REPO, "What is 17 + 25?"]));
    assert_eq!(text(&output.stdout), "42\n", "{}", text(&output.stderr));
    assert_eq!(fake.requests(), before);
    let output = run(lily(&["pull", REPO]).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(text(&output.stdout).trim_end(), snapshot(home).to_str().unwrap());
    let mut nowhere = lily(&["pull", REPO, "--retries", "0"]);
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
