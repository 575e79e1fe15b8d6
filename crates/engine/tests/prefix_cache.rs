//! What the engine promises about the prefix cache and about memory, on a toy device.

mod common;

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use common::{
    Call, EOS, FakeBackend, PAGE, PAGE_BYTES, PATIENCE, STATE_BYTES, gate, mixing, mixing_text, outcome,
    tokenizer, wait_until_idle,
};
use lily_engine::backend::{BackendError, Input, SequenceId};
use lily_engine::engine::{CacheOptions, Engine, EngineOptions, Generation, Request, SubmitError};
use lily_engine::prefix_cache::positions::TurnMarkers;
use lily_engine::sampler::SamplingParams;
use proptest::prelude::*;

/// A letter that stands for the beginning of a turn.
const TURN: u32 = b'|' as u32;

fn options(cache_bytes: u64) -> EngineOptions {
    let markers = Some(TurnMarkers { turn_start: TURN, tool_response: None });
    let cache = CacheOptions { bytes: cache_bytes, markers, ..CacheOptions::default() };
    EngineOptions { eos_token_ids: vec![EOS], cache, ..EngineOptions::default() }
}

fn start(backend: FakeBackend, options: EngineOptions) -> Engine {
    Engine::start(Box::new(backend), tokenizer(), options)
}

fn ask(text: &str, max_tokens: usize) -> Request {
    Request { max_tokens: Some(max_tokens), ..Request::new(text.bytes().map(u32::from).collect()) }
}

/// Asks, checks the answer and returns how many tokens of the prompt came from the cache.
fn cached(engine: &Engine, text: &str, max_tokens: usize) -> usize {
    let request = ask(text, max_tokens);
    let expected = mixing_text(&request.prompt, max_tokens);
    let outcome = outcome(engine.submit(request).unwrap());
    assert_eq!(outcome.text, expected, "{text:?}: {:?}", outcome.failure);
    outcome.usage.cached_tokens
}

/// Makes the backend wait in its first call, so that a test can submit several requests to one iteration.
fn gated(backend: FakeBackend) -> (Sender<()>, FakeBackend) {
    let (open, hook) = gate();
    (open, backend.with_hook(hook))
}

/// With no request running, all that is held is the cache's, and no more than it may hold.
fn assert_only_the_cache_is_left(engine: &Engine, budget: u64) {
    wait_until_idle(engine);
    let memory = engine.stats().memory;
    assert_eq!(memory.used, memory.snapshots);
    assert!(memory.snapshots <= budget, "{memory:?}");
    if engine.stats().cache.snapshots == 0 {
        assert_eq!(memory.used, 0);
    }
}

fn extends(calls: &Mutex<Vec<Call>>) -> Vec<(SequenceId, usize)> {
    let calls = calls.lock().unwrap();
    let extends = calls.iter().filter_map(|call| match call {
        Call::Extend(sequence, tokens) => Some((*sequence, tokens.len())),
        _ => None,
    });
    extends.collect()
}

#[test]
fn a_conversation_goes_on_where_it_was_and_branches_where_it_parted() {
    for pipeline in [false, true] {
        let engine = start(FakeBackend::new(500, mixing), EngineOptions { pipeline, ..options(u64::MAX) });
        let first = "|sys be brief|user one|bot ";
        assert_eq!(cached(&engine, first, 5), 0);
        // The answer came back as it was: all of it but the token that was never fed.
        let prompt: Vec<u32> = first.bytes().map(u32::from).collect();
        let second = format!("{first}{}|user two|bot ", mixing_text(&prompt, 5));
        assert_eq!(cached(&engine, &second, 5), first.len() + 4);
        // It came back changed: back to where the model's turn began.
        let changed = "|sys be brief|user one|bot changed|user two|bot ";
        assert_eq!(cached(&engine, changed, 5), "|sys be brief|user one".len());
        // Another question: back to the end of the system block.
        assert_eq!(cached(&engine, "|sys be brief|user other|bot ", 5), "|sys be brief".len());
        assert_eq!(cached(&engine, "|sys be rude|user one|bot ", 5), 0);
        // The same prompt again: the model's turn has to be read to be answered.
        assert_eq!(cached(&engine, first, 5), "|sys be brief|user one".len());
        assert_only_the_cache_is_left(&engine, u64::MAX);
    }
}

#[test]
fn long_text_is_snapshotted_on_the_way_and_where_prompts_were_seen_to_part() {
    let every = 64;
    let cache = CacheOptions { every, markers: None, ..options(u64::MAX).cache };
    let engine = start(FakeBackend::new(2000, mixing), EngineOptions { cache, ..options(u64::MAX) });
    let book = "a long text that says nothing ".repeat(30);
    assert_eq!(cached(&engine, &book, 2), 0);
    let other = |end: &str| format!("{}{end}", &book[..500]);
    assert_eq!(cached(&engine, &other("one"), 2), 500 / every * every);
    let cache = CacheOptions { markers: None, ..options(u64::MAX).cache };
    let engine = start(FakeBackend::new(2000, mixing), EngineOptions { cache, ..options(u64::MAX) });
    assert_eq!(cached(&engine, &book, 2), 0);
    assert_eq!(cached(&engine, &other("one"), 2), 0);
    assert_eq!(cached(&engine, &other("two"), 2), 500);
}

#[test]
fn a_crowd_with_one_beginning_reads_it_once() {
    for pipeline in [false, true] {
        let (open, backend) = gated(FakeBackend::new(500, mixing));
        let engine = start(backend, EngineOptions { pipeline, prefill_chunk: Some(16), ..options(u64::MAX) });
        let system = format!("|sys {}", "many rules ".repeat(20));
        let prompts: Vec<String> = (0..6).map(|i| format!("{system}|user task {i}|bot ")).collect();
        let running: Vec<Generation> =
            prompts.iter().map(|prompt| engine.submit(ask(prompt, 3)).unwrap()).collect();
        open.send(()).unwrap();
        for (i, (generation, prompt)) in running.into_iter().zip(&prompts).enumerate() {
            let outcome = outcome(generation);
            assert_eq!(outcome.text, mixing_text(&ask(prompt, 3).prompt, 3));
            assert_eq!(outcome.usage.cached_tokens, if i == 0 { 0 } else { system.len() });
        }
    }
}

#[test]
fn the_cache_keeps_to_its_budget_and_the_last_used_stay() {
    // Room for three snapshots of prompts like these, and not for four.
    let bytes_of = |tokens: usize| STATE_BYTES + tokens.div_ceil(PAGE) as u64 * PAGE_BYTES;
    let budget = 3 * bytes_of(12) + 60;
    let engine = start(FakeBackend::new(500, mixing), options(budget));
    for text in ["one", "two", "three", "four"] {
        cached(&engine, &format!("|{text:9}|"), 1);
        assert_only_the_cache_is_left(&engine, budget);
    }
    assert!(engine.stats().cache.evicted > 0);
    assert!(cached(&engine, &format!("|{:9}|", "four"), 1) > 0, "the last one is there");
    assert_eq!(cached(&engine, &format!("|{:9}|", "one"), 1), 0, "the first one had to go");
    // What is larger than the budget is not even tried.
    let stored = engine.stats().cache.stored;
    cached(&engine, &format!("|{}", "x".repeat(300)), 1);
    assert_eq!(engine.stats().cache.stored, stored);
}

#[test]
fn a_budget_of_zero_keeps_nothing() {
    let backend = FakeBackend::new(500, mixing);
    let calls = backend.calls();
    let engine = start(backend, options(0));
    assert_eq!([1, 2].map(|_| cached(&engine, "|sys|user|bot", 3)), [0, 0]);
    assert_only_the_cache_is_left(&engine, 0);
    assert!(!calls.lock().unwrap().iter().any(|call| matches!(call, Call::Snapshot(_))));
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let (open, backend) = gated(FakeBackend::new(2000, mixing));
    let calls = backend.calls();
    let engine = start(backend, EngineOptions { prefill_chunk: Some(10), ..options(0) });
    let long = engine.submit(ask(&"long ".repeat(100), 1)).unwrap();
    let short = engine.submit(ask("twenty letters, done", 1)).unwrap();
    open.send(()).unwrap();
    assert_eq!(outcome(short).tokens.len(), 1);
    let before: Vec<SequenceId> = extends(&calls).into_iter().map(|(sequence, _)| sequence).take(4).collect();
    assert_eq!(before, [1, 2, 1, 2].map(SequenceId), "they take turns");
    assert_eq!(outcome(long).tokens.len(), 1);
}

#[test]
fn between_two_tokens_of_a_stream_lies_at_most_one_busy_chunk() {
    let (open, backend) = gated(FakeBackend::new(2000, mixing));
    let calls = backend.calls();
    let options = EngineOptions { prefill_chunk: Some(64), busy_chunk: Some(8), ..options(0) };
    let engine = start(backend, options);
    let stream = engine.submit(ask("s", 40)).unwrap();
    let prompts = [100, 200, 30].map(|length| engine.submit(ask(&"p".repeat(length), 1)).unwrap());
    open.send(()).unwrap();
    outcome(stream);
    prompts.into_iter().for_each(|prompt| drop(outcome(prompt)));
    let (mut since, mut decoded, mut worst) = (0, 0, 0);
    for call in calls.lock().unwrap().iter() {
        match call {
            Call::Decode(_) => (since, decoded) = (0, decoded + 1),
            Call::Extend(sequence, tokens) if *sequence != SequenceId(1) && decoded < 39 => {
                since += tokens.len();
                worst = worst.max(since);
            }
            _ => {}
        }
    }
    assert_eq!(worst, 8);
}

#[test]
fn when_memory_runs_out_the_youngest_gives_way_and_every_answer_is_right() {
    for pipeline in [false, true] {
        // Room for two when they begin, and for one when it has grown.
        let (tokens, limit) = (1200, 3600);
        let (open, backend) = gated(FakeBackend::new(10_000, mixing).with_limit(limit));
        let engine = start(backend, EngineOptions { pipeline, ..options(limit / 3) });
        let texts = ["|first|", "|second|", "|third|"];
        let running = texts.map(|text| engine.submit(ask(text, tokens)).unwrap());
        open.send(()).unwrap();
        for (generation, text) in running.into_iter().zip(texts) {
            let outcome = outcome(generation);
            assert_eq!(outcome.text, mixing_text(&ask(text, 1).prompt, tokens), "{:?}", outcome.failure);
        }
        assert_only_the_cache_is_left(&engine, limit / 3);
        assert!(engine.stats().gave_way > 0, "the test is to run out of memory");
    }
}

/// Pipelined or not, chosen by the host or on the device, in one go or begun anew: a seed gives one text.
#[test]
fn a_device_that_samples_gives_the_tokens_that_the_host_would() {
    let (tokens, limit) = (1200, 3600);
    let texts = ["|first|", "|second|", "|third|"];
    let mut runs = Vec::new();
    for (pipeline, samples) in [(false, false), (false, true), (true, true)] {
        let backend = FakeBackend::new(10_000, mixing).with_limit(limit);
        let backend = if samples { backend.that_samples() } else { backend };
        let calls = backend.calls();
        let (open, backend) = gated(backend);
        let engine = start(backend, EngineOptions { pipeline, ..options(limit / 3) });
        let running = texts.map(|text| {
            let sampling = SamplingParams {
                temperature: 1.5,
                top_k: 40,
                frequency_penalty: 0.1,
                repetition_penalty: 1.1,
                logit_bias: vec![(EOS, -100.0)],
                seed: Some(text.len() as u64),
                ..SamplingParams::default()
            };
            engine.submit(Request { sampling, ..ask(text, tokens) }).unwrap()
        });
        open.send(()).unwrap();
        runs.push(running.map(|generation| outcome(generation).tokens));
        assert!(engine.stats().gave_way > 0, "the test is to run out of memory");
        let ahead = |call: &Call| matches!(call, Call::Decode(steps) if steps.iter().any(|s| s.1 == Input::LastSampled));
        assert_eq!(calls.lock().unwrap().iter().any(ahead), pipeline && samples);
    }
    assert!(runs[0].iter().all(|run| run.len() == tokens));
    assert!(runs[1] == runs[0] && runs[2] == runs[0]);
}

/// The device has less memory than it says: nothing could be planned.
#[test]
fn memory_that_was_promised_and_is_missing_is_found_elsewhere() {
    for pipeline in [false, true] {
        let open_sequences = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&open_sequences);
        let (open, mut hook) = gate();
        let backend = FakeBackend::new(10_000, mixing).with_hook(move |call| {
            hook(call)?;
            let mut open = counted.lock().unwrap();
            match call {
                Call::Open(_) | Call::Resume(..) => *open += 1,
                Call::Close(_) => *open -= 1,
                Call::Decode(steps) if steps.len() > 1 => {
                    return Err(BackendError::OutOfMemory { what: "two at once", bytes: 1 });
                }
                _ => {}
            }
            Ok(())
        });
        let engine = start(backend, EngineOptions { pipeline, ..options(u64::MAX) });
        let texts = ["|a|", "|b|", "|c|", "|d|"];
        let running = texts.map(|text| engine.submit(ask(text, 20)).unwrap());
        open.send(()).unwrap();
        for (generation, text) in running.into_iter().zip(texts) {
            let outcome = outcome(generation);
            assert_eq!(outcome.text, mixing_text(&ask(text, 1).prompt, 20), "{:?}", outcome.failure);
        }
        wait_until_idle(&engine);
        assert_eq!(*open_sequences.lock().unwrap(), 0);
        assert!(engine.stats().gave_way > 0, "the test is to run out of memory");
    }
}

#[test]
fn what_can_never_fit_is_refused_with_the_figures_and_what_fits_alone_is_served() {
    let limit = 2 * STATE_BYTES + PAGE_BYTES + 10 * PAGE_BYTES;
    let engine = start(FakeBackend::new(10_000, mixing).with_limit(limit), options(limit));
    let error = engine.submit(ask(&"x".repeat(40), 1)).unwrap_err();
    assert_eq!(error, SubmitError::NeverFits { prompt: 40, fits: 40, memory: limit });
    assert!(error.to_string().contains("310 bytes") && error.to_string().contains("40 tokens"), "{error}");
    let longest = outcome(engine.submit(ask(&"x".repeat(39), 1_000)).unwrap());
    assert_eq!((longest.tokens.len(), longest.failure), (1, None), "the answer ends where memory does");
}

/// What a client does next.
#[derive(Clone, Debug)]
enum Act {
    /// Goes on from the conversation given (of those so far), cut after some tokens, with some more.
    Ask { conversation: usize, keep: usize, more: Vec<u8>, tokens: usize },
    /// Hangs up on one of the requests under way.
    Drop(usize),
    /// Reads one of the requests under way to its end.
    Read(usize),
    /// Waits until nothing runs.
    Wait,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (any::<usize>(), 0usize..90, proptest::collection::vec(b'a'..b'f', 1..24), 1usize..20).prop_map(
            |(conversation, keep, more, tokens)| Act::Ask { conversation, keep, more, tokens }
        ),
        1 => any::<usize>().prop_map(Act::Drop),
        4 => any::<usize>().prop_map(Act::Read),
        1 => Just(Act::Wait),
    ]
}

const CASES: u32 = 40;
/// In every case; ten thousand together.
const ACTS: usize = 250;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES, failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default()
    })]

    /// Random trees of requests, random budgets (and so evictions), little memory, cancellations at random:
    /// every answer that is read is the one without a cache, and nothing is left when all is over.
    #[test]
    fn ten_thousand_random_acts_leave_right_answers_and_true_counts(
        acts in proptest::collection::vec(act(), ACTS),
        budget in prop_oneof![Just(0), 150u64..3_000, Just(u64::MAX)],
        limit in prop_oneof![900u64..4_000, Just(u64::MAX)],
        pipeline: bool,
        chunk in 1usize..40,
        every in 5usize..100,
    ) {
        let backend = FakeBackend::new(160, mixing).with_limit(limit);
        let calls = backend.calls();
        let base = options(budget);
        let cache = CacheOptions { every, ..base.cache };
        let engine = start(backend, EngineOptions {
            pipeline, prefill_chunk: Some(chunk), busy_chunk: Some(chunk.div_ceil(2)), max_running: 5, max_waiting: ACTS, cache, ..base
        });
        let mut conversations: Vec<Vec<u32>> = vec![vec![TURN]];
        let mut running: Vec<(Vec<u32>, usize, Generation)> = Vec::new();
        let read = |(prompt, tokens, generation): (Vec<u32>, usize, Generation)| {
            let outcome = outcome(generation);
            assert_eq!(outcome.failure, None);
            assert_eq!(outcome.text, mixing_text(&prompt, tokens));
            assert!(outcome.usage.cached_tokens < prompt.len());
            let answer: Vec<u32> = outcome.text.bytes().map(u32::from).collect();
            [prompt, answer].concat()
        };
        for act in acts {
            match act {
                Act::Ask { conversation, keep, more, tokens } => {
                    let mut prompt = conversations[conversation % conversations.len()].clone();
                    prompt.truncate(keep);
                    prompt.push(TURN);
                    // Every fifth letter begins a turn.
                    prompt.extend(more.iter().map(|&byte| if byte == b'e' { TURN } else { byte.into() }));
                    let request = Request { max_tokens: Some(tokens), ..Request::new(prompt.clone()) };
                    match engine.submit(request) {
                        Ok(generation) => running.push((prompt, tokens, generation)),
                        Err(error) => prop_assert!(matches!(error, SubmitError::NeverFits { .. }), "{error}"),
                    }
                }
                Act::Drop(index) if !running.is_empty() => drop(running.swap_remove(index % running.len())),
                Act::Read(index) if !running.is_empty() => {
                    conversations.push(read(running.swap_remove(index % running.len())));
                }
                Act::Wait => {
                    for pending in running.drain(..) {
                        conversations.push(read(pending));
                    }
                    assert_only_the_cache_is_left(&engine, budget);
                }
                Act::Drop(_) | Act::Read(_) => {}
            }
        }
        running.clear();
        assert_only_the_cache_is_left(&engine, budget);
        engine.shutdown(PATIENCE);
        // What was opened was closed; what was frozen is in the cache or was discarded.
        let calls = calls.lock().unwrap();
        let count = |picks: fn(&Call) -> bool| calls.iter().filter(|call| picks(call)).count();
        let opened = count(|call| matches!(call, Call::Open(_) | Call::Resume(..)));
        prop_assert!(opened >= count(|call| matches!(call, Call::Close(_))));
        prop_assert_eq!(engine.stats().cache.stored - engine.stats().cache.evicted, engine.stats().cache.snapshots as u64);
    }
}
