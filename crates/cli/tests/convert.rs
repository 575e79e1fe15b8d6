//! A user makes the 4-bit model from the unquantized one: it answers, in little memory, and nothing that was done is lost.

#[path = "support/process.rs"]
mod process;
#[path = "support/small_disk.rs"]
mod small_disk;
#[path = "../../cpu/tests/common/unquantized.rs"]
mod unquantized;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use lily_model::checkpoint::{CONFIG_FILE, Checkpoint};
use lily_model::demo;
use lily_model::safetensors::SINGLE_FILE;
use process::{lily, run, text};
use safetensors::Dtype;
use serde_json::Value;
use small_disk::SmallDisk;
use tempfile::TempDir;

const LILY: &str = env!("CARGO_BIN_EXE_lily");
const GOLDEN: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../oracle/golden/mlx_teacher_forced.safetensors");
/// Longest wait for something that must happen soon; only a failing test waits so long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Conversions that may have written everything before they are killed.
const ATTEMPTS: usize = 20;

/// What the demo means, unquantized, in Hugging Face's layout.
fn source(dtype: Dtype) -> TempDir {
    let dir = TempDir::new().unwrap();
    for (name, contents) in demo::FILES.iter().filter(|(name, _)| *name != SINGLE_FILE) {
        fs::write(dir.path().join(name), contents).unwrap();
    }
    let config = serde_json::from_slice(&fs::read(dir.path().join(CONFIG_FILE)).unwrap()).unwrap();
    unquantized::write(&Checkpoint::demo().unwrap().weights().unwrap(), config, dtype, dir.path());
    dir
}

fn convert(from: &Path, to: &Path, flags: &[&str]) -> Command {
    let mut command = lily(&["convert", from.to_str().unwrap(), to.to_str().unwrap()]);
    command.args(flags);
    command
}

/// The sentence that a conversion failed with.
fn sentence(output: &Output) -> String {
    let stderr = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

/// The weight files that have their own names, with the times of their last changes.
fn whole_files(dir: &Path) -> BTreeMap<String, SystemTime> {
    let Ok(entries) = fs::read_dir(dir) else { return BTreeMap::new() };
    let entries = entries.map(Result::unwrap).filter(|entry| {
        Path::new(&entry.file_name()).extension().is_some_and(|extension| extension == "safetensors")
    });
    entries
        .map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().modified().unwrap()))
        .collect()
}

/// All tensors of the checkpoint in `dir`.
fn tensors(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.tensors().iter().map(|(name, tensor)| (name.to_owned(), tensor.data.to_vec())).collect()
}

#[test]
fn the_converted_demo_answers_as_before_and_took_less_memory_than_its_source_has_bytes() {
    let from = source(Dtype::F32);
    let to = TempDir::new().unwrap();
    let output = run(&mut convert(from.path(), to.path(), &["--threads", "2"]));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let peak = said.split("at most ").nth(1).and_then(|rest| rest.split(" MB of memory").next());
    let peak: f64 = peak.and_then(|megabytes| megabytes.parse().ok()).unwrap_or_else(|| panic!("{said}"));
    let megabytes = fs::metadata(from.path().join(SINGLE_FILE)).unwrap().len() as f64 / 1e6;
    assert!(peak < megabytes / 2.0, "{peak} of {megabytes} MB");

    let model = to.path().to_str().unwrap();
    let chat = run(&mut lily(&["chat", "--model-path", model, "What is 17 + 25?"]));
    assert_eq!(text(&chat.stdout), "42\n", "{}", text(&chat.stderr));
    let flags = ["eval", "--json", "--backend", "cpu", "--reference", GOLDEN, "--positions", "1500"];
    let eval = run(lily(&flags).args(["--model-path", model]));
    let report: Value = serde_json::from_slice(&eval.stdout).unwrap();
    let same = report["answers"]["compared"]["same_top_percent"].as_f64().unwrap();
    assert!(report["answers"]["positions"].as_u64().unwrap() > 100 && same > 99.0, "{report:#}");
}

#[test]
fn the_demo_with_optimized_groups_answers_too_and_is_another_file() {
    let from = source(Dtype::BF16);
    let [plain, optimized] = [vec![], vec!["--optimize"]].map(|flags| {
        let to = TempDir::new().unwrap();
        let output = run(&mut convert(from.path(), to.path(), &flags));
        assert!(output.status.success(), "{}", text(&output.stderr));
        to
    });
    assert!(tensors(plain.path()) != tensors(optimized.path()));
    let model = optimized.path().to_str().unwrap();
    let chat = run(&mut lily(&["chat", "--model-path", model, "What is 17 + 25?"]));
    assert_eq!(text(&chat.stdout), "42\n", "{}", text(&chat.stderr));
}

#[test]
fn a_killed_conversion_goes_on_with_what_is_missing() {
    let from = source(Dtype::BF16);
    let reference = TempDir::new().unwrap();
    assert!(run(&mut convert(from.path(), reference.path(), &[])).status.success());
    let flags = ["--shard-bytes", "500KB", "--threads", "2"];
    for _ in 0..ATTEMPTS {
        let to = TempDir::new().unwrap();
        let mut command = convert(from.path(), to.path(), &flags);
        let mut process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let start = Instant::now();
        while whole_files(to.path()).len() < 2 {
            assert!(start.elapsed() < PATIENCE, "no file becomes whole");
            sleep(Duration::from_millis(1));
        }
        // SIGKILL, on systems that have it.
        process.kill().unwrap();
        if process.wait().unwrap().success() {
            continue;
        }
        let before = whole_files(to.path());
        let output = run(&mut convert(from.path(), to.path(), &flags));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let after = whole_files(to.path());
        if before.len() == after.len() {
            // It was killed after its last file.
            continue;
        }
        assert!(text(&output.stderr).contains("weight files were there already"));
        assert!(before.iter().all(|(name, time)| after[name] == *time), "{before:?} {after:?}");
        assert!(tensors(to.path()) == tensors(reference.path()));
        return;
    }
    panic!("each of {ATTEMPTS} conversions had written everything before it was killed");
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_told_and_costs_nothing_that_was_done() {
    let from = source(Dtype::BF16);
    let to = TempDir::new().unwrap();
    let (from, to) = (from.path(), to.path());
    // A limit on files stands for a full disk: of 2.2 MB files the writing of each fails on the way. Blocks are of 512 or
    // of 1024 bytes.
    let limited = |blocks: u32| {
        let line = format!(
            "trap '' XFSZ; ulimit -f {blocks}; exec {LILY} convert {} {} --shard-bytes 2200KB --threads 1",
            from.display(),
            to.display()
        );
        run(Command::new("sh").args(["-c", &line]).stdin(Stdio::null()))
    };
    let told = sentence(&limited(1000));
    assert!(told.contains("the disk is full; make room and run the same command again"), "{told}");
    let left: Vec<_> = fs::read_dir(to).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lily-convert.json"]);
    let output = limited(1_000_000);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let chat = run(&mut lily(&["chat", "--model-path", to.to_str().unwrap(), "What is 17 + 25?"]));
    assert_eq!(text(&chat.stdout), "42\n");
}

#[cfg(unix)]
#[test]
fn a_disk_that_is_too_small_is_told_before_anything_is_written() {
    let from = source(Dtype::BF16);
    let dir = TempDir::new().unwrap();
    // Not every system lets a test mount something; CI's does, and `SmallDisk` knows it.
    let Some(disk) = SmallDisk::mount(dir.path(), 24_000_000) else {
        println!("no disk was too small: nothing can be mounted in a namespace here");
        return;
    };
    let to = dir.path().join("out");
    let convert =
        || run(&mut disk.command(LILY, &["convert", from.path().to_str().unwrap(), to.to_str().unwrap()]));
    disk.fill(4_000_000);
    let told = sentence(&convert());
    assert!(told.contains("bytes free and 12") && told.contains("more, or choose another disk"), "{told}");
    assert!(!disk.seen().join("out").exists());
    disk.empty();
    let output = convert();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(disk.seen().join("out").join(CONFIG_FILE).exists());
}

#[test]
fn what_cannot_be_converted_is_one_sentence() {
    let dir = TempDir::new().unwrap();
    let from = dir.path().join("demo");
    fs::create_dir(&from).unwrap();
    for (name, contents) in demo::FILES {
        fs::write(from.join(name), contents).unwrap();
    }
    let to = dir.path().join("out");
    assert!(sentence(&run(&mut convert(&from, &to, &[]))).contains("is quantized already"));
    assert!(sentence(&run(&mut convert(&dir.path().join("none"), &to, &[]))).contains("none"));
    assert!(!to.exists());
}
