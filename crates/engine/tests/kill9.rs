//! A server that is killed at any moment, two hundred times over.
//!
//! The test starts itself again as a child that serves requests with a cache directory, reads a number of lines
//! from it, waits a little, a different little each time, and kills it without a warning. The child compares
//! every answer with what it was before the cache existed. So each start finds whatever the last death left.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::demo::Demo;
use common::outcome;
use lily_engine::engine::{CacheOptions, Engine, Request};
use lily_engine::prefix_cache::disk::{DiskOptions, Store};
use lily_engine::prefix_cache::fingerprint::fingerprint;

const KILLS: usize = 200;
/// Tells the child that it is one, and where the directory is.
const DIRECTORY: &str = "LILY_KILL9_DIRECTORY";
/// The answers to compare with, as the parent got them.
const ANSWERS: &str = "LILY_KILL9_ANSWERS";
/// How long a child may live after its first answer, at most.
const LONGEST_LIFE: Duration = Duration::from_millis(40);
/// Room for some of the records only, so that others are removed while it goes on.
const BUDGET: u64 = 24 << 20;

/// Conversations that share a beginning, each a few pages long.
fn prompts() -> Vec<Vec<u32>> {
    let system: Vec<u32> = (0..70).map(|i| 300 + i * 7 % 90).collect();
    (0..8).map(|who| system.iter().copied().chain((0..30).map(|i| 400 + (i * who) % 50)).collect()).collect()
}

fn ask(engine: &Engine, prompt: Vec<u32>) -> (Vec<u32>, usize) {
    let request = Request { max_tokens: Some(3), ignore_eos: true, ..Request::new(prompt) };
    let outcome = outcome(engine.submit(request).unwrap());
    assert_eq!(outcome.failure, None);
    (outcome.tokens, outcome.usage.cached_tokens)
}

fn options(demo: &Demo, directory: &str) -> DiskOptions {
    DiskOptions { dir: directory.into(), bytes: BUDGET, model: fingerprint(&demo.weights) }
}

/// The child: answers for ever, and says each time whether rightly, and how much of it was known.
fn serve(directory: &str) {
    let demo = Demo::load();
    let expected: Vec<Vec<u32>> = serde_json::from_str(&std::env::var(ANSWERS).unwrap()).unwrap();
    let disk = Some(options(&demo, directory));
    let cache = CacheOptions { bytes: 8 << 20, every: 32, disk, ..CacheOptions::default() };
    let engine = demo.engine(demo.backend(usize::MAX), cache);
    // Where in the circle it begins differs from child to child.
    let start = std::process::id() as usize;
    for index in (start..).map(|i| i % expected.len()) {
        let (answer, cached) = ask(&engine, prompts().swap_remove(index));
        let verdict = if answer == expected[index] { "right" } else { "WRONG" };
        let mut out = std::io::stdout().lock();
        // The parent may be gone; then there is nobody to serve.
        if writeln!(out, "{verdict} {cached}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

#[test]
fn two_hundred_deaths_cost_no_right_answer_and_no_whole_record() {
    if let Ok(directory) = std::env::var(DIRECTORY) {
        return serve(&directory);
    }
    let demo = Demo::load();
    let cold = demo.engine(demo.backend(usize::MAX), CacheOptions::default());
    let expected: Vec<Vec<u32>> = prompts().into_iter().map(|prompt| ask(&cold, prompt).0).collect();
    let expected = serde_json::to_string(&expected).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let (mut answers, mut resumed) = (0, 0);
    for death in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "two_hundred_deaths_cost_no_right_answer_and_no_whole_record", "--nocapture"])
            .env(DIRECTORY, path)
            .env(ANSWERS, &expected)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut first = None;
        let mut check = |line: String| {
            let mut words = line.split(' ').skip_while(|word| !matches!(*word, "right" | "WRONG"));
            let Some(verdict) = words.next() else { return false };
            assert_eq!(verdict, "right", "after {death} deaths");
            // The last line may be cut short by the death of its writer.
            let cached: Option<usize> = words.next().and_then(|word| word.parse().ok());
            first.get_or_insert(cached.unwrap_or(0));
            answers += 1;
            true
        };
        while !check(lines.next().expect("a child answers before it is killed")) {}
        let life = LONGEST_LIFE.as_micros() as u64 * (death as u64 * 37 % 100) / 100;
        std::thread::sleep(Duration::from_micros(life));
        child.kill().unwrap();
        child.wait().unwrap();
        lines.for_each(|line| _ = check(line));
        resumed += usize::from(first.unwrap() > 0);
    }
    println!("{KILLS} deaths, {answers} right answers, {resumed} first answers began from a record");
    assert!(resumed > KILLS / 2, "records do not survive: {resumed} of {KILLS} starts found one");

    // Every record that has its name is whole.
    let store = Store::open(&options(&demo, path), &{
        use lily_engine::backend::Backend;
        demo.backend(usize::MAX).layout()
    })
    .unwrap();
    let mut records = 0;
    for prompt in prompts() {
        for length in 1..prompt.len() {
            if let Some(key) = store.at(&prompt[..length]) {
                assert!(store.load(key, &prompt).is_some(), "the record of {length} tokens is broken");
                records += 1;
            }
        }
    }
    assert!(records > 0);
    let names = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    assert!(
        names.into_iter().all(|entry| entry.path().extension().is_some_and(|e| e == "lily")),
        "a leftover"
    );
}
