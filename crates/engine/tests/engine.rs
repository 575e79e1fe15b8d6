//! What the engine promises about requests, on a toy device.

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{
    Call, EOS, FakeBackend, PATIENCE, gate, mixing, mixing_text, outcome, scripted, tokenizer,
    wait_until_idle,
};
use lily_engine::backend::{BackendError, Input, SequenceId};
use lily_engine::engine::{
    CacheOptions, Engine, EngineOptions, Event, FinishReason, Generation, Load, Request, SubmitError, Usage,
};
use lily_engine::sampler::SamplingParams;

fn start(backend: FakeBackend, options: EngineOptions) -> Engine {
    let options = EngineOptions { eos_token_ids: vec![EOS], ..options };
    Engine::start(Box::new(backend), tokenizer(), options)
}

fn with_pipeline(pipeline: bool) -> EngineOptions {
    EngineOptions { pipeline, ..EngineOptions::default() }
}

fn with_cache(bytes: u64) -> EngineOptions {
    EngineOptions { cache: CacheOptions { bytes, ..CacheOptions::default() }, ..EngineOptions::default() }
}

/// A request whose prompt is the bytes of `text`.
fn ask(text: &str) -> Request {
    Request::new(text.bytes().map(u32::from).collect())
}

/// Every sequence that was opened was closed, once.
fn assert_all_closed(calls: &Mutex<Vec<Call>>) {
    let calls = calls.lock().unwrap();
    let mut open: Vec<SequenceId> = Vec::new();
    for call in calls.iter() {
        match call {
            Call::Open(sequence) => open.push(*sequence),
            Call::Close(sequence) => open.retain(|s| s != sequence),
            _ => {}
        }
    }
    assert_eq!(open, []);
}

#[test]
fn an_answer_streams_to_its_end_of_sequence_token() {
    for pipeline in [false, true] {
        let backend = FakeBackend::new(100, scripted(2, "Grüße 👋!"));
        let calls = backend.calls();
        let engine = start(backend, with_pipeline(pipeline));
        let outcome = outcome(engine.submit(ask("Hi")).unwrap());
        assert_eq!(outcome.text, "Grüße 👋!");
        assert_eq!(outcome.reason, Some(FinishReason::EndOfSequence));
        let tokens = "Grüße 👋!".len();
        assert_eq!(outcome.tokens.len(), tokens);
        assert_eq!(
            outcome.usage,
            Usage { prompt_tokens: 2, cached_tokens: 0, completion_tokens: tokens + 1 }
        );
        wait_until_idle(&engine);
        assert_all_closed(&calls);
    }
}

#[test]
fn end_of_sequence_can_be_ignored() {
    let engine = start(FakeBackend::new(10, scripted(2, "ab")), EngineOptions::default());
    let outcome = outcome(engine.submit(Request { ignore_eos: true, ..ask("Hi") }).unwrap());
    assert_eq!((outcome.text.as_str(), outcome.reason), ("ab", Some(FinishReason::Length)));
    assert_eq!(outcome.tokens[2..], [EOS; 6]);
}

#[test]
fn a_prompt_is_prefilled_in_order_and_in_chunks() {
    let backend = FakeBackend::new(100, scripted(7, "x"));
    let calls = backend.calls();
    let engine = start(backend, EngineOptions::default());
    let outcome = outcome(engine.submit(Request { prefill_chunk: Some(3), ..ask("abcdefg") }).unwrap());
    let progress: Vec<(usize, usize)> = outcome
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Prefill { done, total, .. } => Some((*done, *total)),
            _ => None,
        })
        .collect();
    assert_eq!(progress, [(3, 7), (6, 7), (7, 7)]);
    let chunks: Vec<Vec<u32>> = calls
        .lock()
        .unwrap()
        .iter()
        .filter_map(|call| match call {
            Call::Extend(_, tokens) => Some(tokens.clone()),
            _ => None,
        })
        .collect();
    assert_eq!(chunks.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
    assert_eq!(chunks.concat(), ask("abcdefg").prompt);
}

/// The promise that all the machinery must keep: company, chunks and pipelining change no answer.
#[test]
fn the_answer_does_not_depend_on_chunks_company_or_pipelining() {
    let prompts = ["a", "some prompt", "another, longer prompt of several chunks", "q", "zz top", "end"];
    for pipeline in [false, true] {
        for chunk in [1, 4, 512] {
            for logprobs in [None, Some(0)] {
                let (open, hook) = gate();
                let backend = FakeBackend::new(200, mixing).with_hook(hook);
                let calls = backend.calls();
                let options = EngineOptions { max_running: 4, ..with_pipeline(pipeline) };
                let engine = start(backend, options);
                let running: Vec<Generation> = (1..)
                    .zip(prompts)
                    .map(|(i, prompt)| {
                        // Only one of them needs the host, so both kinds of step meet in one batch.
                        let logprobs = if i == 3 { logprobs } else { None };
                        let request = Request {
                            max_tokens: Some(5 * i),
                            prefill_chunk: Some(chunk),
                            sampling: SamplingParams { logprobs, ..SamplingParams::default() },
                            ..ask(prompt)
                        };
                        engine.submit(request).unwrap()
                    })
                    .collect();
                open.send(()).unwrap();
                for ((i, prompt), generation) in (1..).zip(prompts).zip(running) {
                    let outcome = outcome(generation);
                    assert_eq!(outcome.text, mixing_text(&ask(prompt).prompt, 5 * i), "{prompt:?}");
                    assert_eq!(outcome.reason, Some(FinishReason::Length));
                    assert_eq!(outcome.usage.completion_tokens, 5 * i);
                }
                wait_until_idle(&engine);
                assert_all_closed(&calls);
            }
        }
    }
}

#[test]
fn running_sequences_decode_in_one_batch_between_the_chunks_of_a_prompt() {
    let (open, hook) = gate();
    let backend = FakeBackend::new(200, mixing).with_hook(hook);
    let calls = backend.calls();
    let engine = start(backend, EngineOptions { prefill_chunk: Some(2), ..EngineOptions::default() });
    let first = engine.submit(Request { max_tokens: Some(8), ..ask("a") }).unwrap();
    let second = engine.submit(Request { max_tokens: Some(8), ..ask("b") }).unwrap();
    let long = engine.submit(Request { max_tokens: Some(1), ..ask("abcdefgh") }).unwrap();
    open.send(()).unwrap();
    [first, second, long].into_iter().for_each(|generation| drop(outcome(generation)));
    let (mut batches, mut since_decode) = (Vec::new(), 0);
    for call in calls.lock().unwrap().iter() {
        match call {
            Call::Decode(steps) => {
                batches.push(steps.len());
                since_decode = 0;
            }
            Call::Extend(..) if !batches.is_empty() => {
                since_decode += 1;
                assert_eq!(since_decode, 1, "two chunks without a decode step between them");
            }
            _ => {}
        }
    }
    assert_eq!(batches.iter().filter(|&&size| size == 2).count(), 6, "{batches:?}");
    assert_eq!(batches.iter().sum::<usize>(), 14);
}

#[test]
fn greedy_steps_are_enqueued_before_the_last_token_is_collected() {
    let backend = FakeBackend::new(100, scripted(1, "abc"));
    let calls = backend.calls();
    let engine = start(backend, with_pipeline(true));
    assert_eq!(outcome(engine.submit(ask("x")).unwrap()).text, "abc");
    wait_until_idle(&engine);
    let s = SequenceId(1);
    let decode = || Call::Decode(vec![(s, Input::LastSampled)]);
    let collect = || Call::Collect(vec![s]);
    assert_eq!(
        calls.lock().unwrap()[1..],
        [
            Call::Extend(s, vec![u32::from(b'x')]),
            decode(),
            collect(),
            decode(),
            collect(),
            decode(),
            collect(),
            // Enqueued before the end-of-sequence token was seen: collected, dropped, then closed.
            decode(),
            collect(),
            collect(),
            Call::Close(s),
        ]
    );
}

#[test]
fn max_tokens_is_exact_and_costs_no_step_too_many() {
    for pipeline in [false, true] {
        let backend = FakeBackend::new(100, mixing);
        let calls = backend.calls();
        let engine = start(backend, with_pipeline(pipeline));
        let outcome = outcome(engine.submit(Request { max_tokens: Some(3), ..ask("Hi") }).unwrap());
        assert_eq!((outcome.tokens.len(), outcome.reason), (3, Some(FinishReason::Length)));
        wait_until_idle(&engine);
        let steps = calls.lock().unwrap().iter().filter(|call| matches!(call, Call::Decode(_))).count();
        assert_eq!(steps, 2, "the first token comes from the prompt");
    }
}

#[test]
fn stop_strings_end_the_text_wherever_tokens_are_cut() {
    for pipeline in [false, true] {
        let engine = start(FakeBackend::new(100, scripted(2, "one\ntwo\nthree")), with_pipeline(pipeline));
        let stop = vec!["\nthr".to_owned(), "never".to_owned()];
        let outcome = outcome(engine.submit(Request { stop, ..ask("Hi") }).unwrap());
        assert_eq!(outcome.text, "one\ntwo");
        assert_eq!(outcome.reason, Some(FinishReason::StopString));
        assert_eq!(outcome.usage.completion_tokens, "one\ntwo\nthr".len());
    }
}

#[test]
fn text_held_for_a_stop_string_comes_with_the_end() {
    let engine = start(FakeBackend::new(100, scripted(2, "one\nth")), EngineOptions::default());
    let outcome = outcome(engine.submit(Request { stop: vec!["\nthree".into()], ..ask("Hi") }).unwrap());
    assert_eq!((outcome.text.as_str(), outcome.reason), ("one\nth", Some(FinishReason::EndOfSequence)));
}

#[test]
fn the_context_limit_ends_an_answer_and_refuses_a_prompt() {
    for pipeline in [false, true] {
        let engine = start(FakeBackend::new(10, mixing), with_pipeline(pipeline));
        let outcome = outcome(engine.submit(Request { max_tokens: Some(100), ..ask("1234") }).unwrap());
        assert_eq!((outcome.tokens.len(), outcome.reason), (6, Some(FinishReason::Length)));
        let error = engine.submit(ask("0123456789")).unwrap_err();
        assert_eq!(error, SubmitError::PromptTooLong { prompt: 10, limit: 10 });
    }
}

#[test]
fn requests_that_cannot_run_are_refused_at_once() {
    let engine = start(FakeBackend::new(10, mixing), EngineOptions::default());
    let refused = |request: Request| engine.submit(request).unwrap_err().to_string();
    assert_eq!(refused(Request::new(vec![])), "the prompt is empty; give at least one token");
    assert_eq!(
        refused(Request::new(vec![1, 257])),
        "the prompt's token 257 is outside the vocabulary of 257; use the model's own tokenizer"
    );
    assert_eq!(
        refused(Request { max_tokens: Some(0), ..ask("Hi") }),
        "max_tokens is 0; it must be at least 1"
    );
    assert_eq!(
        refused(Request { stop: vec![String::new()], ..ask("Hi") }),
        "stop string 0 is empty; leave it out"
    );
    let sampling = SamplingParams { top_p: 2.0, ..SamplingParams::default() };
    assert_eq!(refused(Request { sampling, ..ask("Hi") }), "top_p is 2; it must be from 0 to 1");
    assert_eq!(engine.load(), Load::default());
}

#[test]
fn sampling_and_logprobs_come_from_the_host() {
    let engine = start(FakeBackend::new(100, mixing), with_pipeline(true));
    let seeded = |seed| {
        let sampling = SamplingParams {
            temperature: 1.0,
            seed: Some(seed),
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        engine.submit(Request { sampling, max_tokens: Some(20), ..ask("Hi") }).unwrap()
    };
    let [first, again, other] = [seeded(1), seeded(1), seeded(2)].map(outcome);
    assert_eq!(first.tokens, again.tokens);
    assert_ne!(first.tokens, other.tokens);
    for event in &first.events {
        if let Event::Token { id, logprobs, .. } = event {
            let logprobs = logprobs.as_ref().unwrap();
            assert_eq!(logprobs.top.len(), 2);
            assert!(logprobs.chosen <= logprobs.top[0].1);
            assert!(logprobs.chosen < logprobs.top[0].1 || *id == logprobs.top[0].0);
        }
    }
}

#[test]
fn dropping_a_generation_frees_its_sequence_within_one_step() {
    const PERMITS: usize = 12;
    for pipeline in [false, true] {
        // The hook keeps the engine in step with the test: one permit, one call.
        let (permit, permits) = channel::<()>();
        let backend = FakeBackend::new(10_000, mixing).with_hook(move |_| {
            let _ = permits.recv_timeout(PATIENCE);
            Ok(())
        });
        let calls = backend.calls();
        let engine = start(backend, with_pipeline(pipeline));
        let mut dropped = engine.submit(ask("drop me")).unwrap();
        (0..PERMITS).for_each(|_| permit.send(()).unwrap());
        while !matches!(dropped.blocking_recv().unwrap(), Event::Token { .. }) {}
        let begin = Instant::now();
        while calls.lock().unwrap().len() < PERMITS {
            assert!(begin.elapsed() < PATIENCE, "the engine made too few calls");
            std::thread::sleep(Duration::from_millis(1));
        }
        // It waits for a permit now, somewhere in a step: that one may be finished, but no other begun.
        let before = decodes(&calls);
        drop(dropped);
        (0..PERMITS).for_each(|_| permit.send(()).unwrap());
        wait_until_idle(&engine);
        assert_all_closed(&calls);
        assert!(decodes(&calls) - before <= 1, "the engine went on for {} steps", decodes(&calls) - before);
    }
}

fn decodes(calls: &Mutex<Vec<Call>>) -> usize {
    calls.lock().unwrap().iter().filter(|call| matches!(call, Call::Decode(_))).count()
}

#[test]
fn a_dropped_request_that_waits_never_starts() {
    let (open, hook) = gate();
    let backend = FakeBackend::new(100, mixing).with_hook(hook);
    let calls = backend.calls();
    let engine = start(backend, EngineOptions { max_running: 1, ..EngineOptions::default() });
    let first = engine.submit(Request { max_tokens: Some(3), ..ask("first") }).unwrap();
    drop(engine.submit(ask("second")).unwrap());
    open.send(()).unwrap();
    outcome(first);
    wait_until_idle(&engine);
    let opened = calls.lock().unwrap().iter().filter(|call| matches!(call, Call::Open(_))).count();
    assert_eq!(opened, 1);
}

#[test]
fn more_requests_than_may_wait_are_refused_until_one_is_done() {
    let (open, hook) = gate();
    let backend = FakeBackend::new(100, mixing).with_hook(hook);
    let options = EngineOptions { max_running: 2, max_waiting: 1, ..EngineOptions::default() };
    let engine = start(backend, options);
    let request = || Request { max_tokens: Some(2), ..ask("Hi") };
    let taken: Vec<Generation> = (0..3).map(|_| engine.submit(request()).unwrap()).collect();
    let error = engine.submit(request()).unwrap_err();
    assert!(matches!(error, SubmitError::Busy { running, waiting, .. } if running + waiting == 3), "{error}");
    open.send(()).unwrap();
    for generation in taken {
        assert_eq!(outcome(generation).tokens.len(), 2);
    }
    wait_until_idle(&engine);
    assert!(engine.submit(request()).is_ok());
}

#[test]
fn a_failed_step_fails_only_the_sequence_that_it_concerns() {
    for pipeline in [false, true] {
        let device = || BackendError::Device("out of order".to_owned());
        let bad = SequenceId(2);
        let (open, mut hook) = gate();
        let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
            hook(call)?;
            match call {
                Call::Decode(steps) if steps.iter().any(|&(sequence, _)| sequence == bad) => Err(device()),
                _ => Ok(()),
            }
        });
        let calls = backend.calls();
        let engine = start(backend, with_pipeline(pipeline));
        let request = |text| Request { max_tokens: Some(6), ..ask(text) };
        let running = ["a", "b", "c"].map(|text| engine.submit(request(text)).unwrap());
        open.send(()).unwrap();
        let [first, failed, third] = running.map(outcome);
        assert_eq!(failed.failure.as_deref(), Some("the device failed: out of order"));
        assert_eq!(first.text, mixing_text(&ask("a").prompt, 6));
        assert_eq!(third.text, mixing_text(&ask("c").prompt, 6));
        wait_until_idle(&engine);
        assert_all_closed(&calls);
    }
}

#[test]
fn a_device_that_failed_is_tried_while_nobody_asks_until_it_works_again() {
    let works = Arc::new(AtomicBool::new(false));
    let repaired = Arc::clone(&works);
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&failures);
    let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
        if matches!(call, Call::Extend(..)) && !works.load(Ordering::SeqCst) {
            counted.fetch_add(1, Ordering::SeqCst);
            return Err(BackendError::Device("out of order".to_owned()));
        }
        Ok(())
    });
    let calls = backend.calls();
    let retry_device = Duration::from_millis(50);
    let engine = start(backend, EngineOptions { retry_device, ..EngineOptions::default() });
    assert!(outcome(engine.submit(ask("Hi")).unwrap()).failure.is_some());
    wait_until_idle(&engine);
    assert_eq!(engine.trouble().as_deref(), Some("the device failed: out of order"));
    let wait_while = |broken: &dyn Fn() -> bool| {
        let start = Instant::now();
        while broken() {
            assert!(start.elapsed() < PATIENCE, "nobody tries the device");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // The request and two attempts, all in vain.
    wait_while(&|| failures.load(Ordering::SeqCst) < 3);
    assert_eq!(engine.trouble().as_deref(), Some("the device failed: out of order"));
    repaired.store(true, Ordering::SeqCst);
    wait_while(&|| engine.trouble().is_some());
    // One attempt that works; then it is left alone.
    let extended = |calls: &[Call]| calls.iter().filter(|call| matches!(call, Call::Extend(..))).count();
    let tried = failures.load(Ordering::SeqCst) + 1;
    assert_eq!(extended(&calls.lock().unwrap()), tried);
    std::thread::sleep(3 * retry_device);
    assert_eq!(extended(&calls.lock().unwrap()), tried);
    assert_all_closed(&calls);
}

#[test]
fn a_device_that_fails_is_in_trouble_until_it_works_again() {
    let mut failed = false;
    let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
        let fails = matches!(call, Call::Extend(..)) && !std::mem::replace(&mut failed, true);
        if fails { Err(BackendError::Device("out of order".to_owned())) } else { Ok(()) }
    });
    // Nobody but a request tries the device.
    let options = EngineOptions { retry_device: Duration::MAX, ..EngineOptions::default() };
    let engine = start(backend, options);
    let request = || Request { max_tokens: Some(3), ..ask("Hi") };
    assert!(outcome(engine.submit(request()).unwrap()).failure.is_some());
    wait_until_idle(&engine);
    assert_eq!(engine.trouble().as_deref(), Some("the device failed: out of order"));
    assert_eq!(outcome(engine.submit(request()).unwrap()).tokens.len(), 3);
    wait_until_idle(&engine);
    assert_eq!(engine.trouble(), None);
    let stats = engine.stats();
    assert_eq!((stats.generated_tokens, stats.prompt_tokens), (3, 2 * ask("Hi").prompt.len() as u64));
}

#[test]
fn every_call_that_can_fail_fails_its_request_and_not_the_engine() {
    type Picks = fn(&Call) -> bool;
    let kinds: [Picks; 4] = [
        |call| matches!(call, Call::Open(_)),
        |call| matches!(call, Call::Extend(..)),
        |call| matches!(call, Call::Decode(_)),
        |call| matches!(call, Call::Collect(_)),
    ];
    for picks in kinds {
        let mut failed = false;
        let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
            if picks(call) && !std::mem::replace(&mut failed, true) {
                return Err(BackendError::OutOfMemory { what: "a test", bytes: 1 });
            }
            Ok(())
        });
        let calls = backend.calls();
        let engine = start(backend, EngineOptions::default());
        let request = || Request { max_tokens: Some(3), ..ask("Hi") };
        let first = outcome(engine.submit(request()).unwrap());
        assert!(first.failure.is_some_and(|message| message.contains("no memory for a test")));
        assert_eq!(outcome(engine.submit(request()).unwrap()).tokens.len(), 3);
        wait_until_idle(&engine);
        let failed_to_open = matches!(calls.lock().unwrap()[..2], [Call::Open(_), Call::Open(_)]);
        if !failed_to_open {
            assert_all_closed(&calls);
        }
    }
}

#[test]
fn a_sequence_without_memory_waits_for_one_that_will_free_some() {
    let (open, mut hook) = gate();
    let running = Arc::new(Mutex::new(0));
    let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
        hook(call)?;
        let mut running = running.lock().unwrap();
        match call {
            Call::Open(_) if *running == 1 => {
                return Err(BackendError::OutOfMemory { what: "a second sequence", bytes: 1 });
            }
            Call::Open(_) => *running += 1,
            Call::Close(_) => *running -= 1,
            _ => {}
        }
        Ok(())
    });
    let engine = start(backend, EngineOptions::default());
    let request = || Request { max_tokens: Some(3), ..ask("Hi") };
    let both = [engine.submit(request()).unwrap(), engine.submit(request()).unwrap()];
    open.send(()).unwrap();
    for outcome in both.map(outcome) {
        assert_eq!(outcome.tokens.len(), 3, "{:?}", outcome.failure);
    }
}

#[test]
fn a_panic_of_the_backend_fails_the_requests_of_that_call_and_no_others() {
    let kinds: [fn(&Call) -> bool; 4] = [
        |call| matches!(call, Call::Open(_)),
        |call| matches!(call, Call::Extend(..)),
        |call| matches!(call, Call::Decode(_)),
        |call| matches!(call, Call::Collect(_)),
    ];
    for pipeline in [false, true] {
        for picks in kinds {
            let (open, mut hook) = gate();
            let mut panicked = false;
            let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
                hook(call)?;
                if picks(call) && !std::mem::replace(&mut panicked, true) {
                    panic!("a bug in the backend");
                }
                Ok(())
            });
            let engine = start(backend, EngineOptions { max_running: 1, ..with_pipeline(pipeline) });
            let request = |text| Request { max_tokens: Some(4), ..ask(text) };
            let both = ["running", "waiting"].map(|text| engine.submit(request(text)).unwrap());
            open.send(()).unwrap();
            let [running, waiting] = both.map(outcome);
            assert!(running.failure.unwrap().contains("a bug in the backend"));
            assert_eq!(waiting.text, mixing_text(&ask("waiting").prompt, 4));
            assert_eq!(engine.stopped(), None);
            wait_until_idle(&engine);
        }
    }
}

#[test]
fn a_panic_outside_of_any_call_fails_what_runs_and_the_engine_goes_on() {
    // Closing is the one call that may not fail, so a panic there is the engine's own.
    let (open, mut hook) = gate();
    let mut panicked = false;
    let backend = FakeBackend::new(100, mixing).with_hook(move |call| {
        hook(call)?;
        if matches!(call, Call::Close(_)) && !std::mem::replace(&mut panicked, true) {
            panic!("a bug in closing");
        }
        Ok(())
    });
    let engine = start(backend, EngineOptions { max_running: 2, ..with_cache(u64::MAX) });
    let request = |text, tokens| Request { max_tokens: Some(tokens), ..ask(text) };
    let three = [("short", 2), ("running", 50), ("waiting", 5)]
        .map(|(text, tokens)| engine.submit(request(text, tokens)).unwrap());
    open.send(()).unwrap();
    let [short, running, waiting] = three.map(outcome);
    assert_eq!(short.failure, None);
    assert!(running.failure.unwrap().contains("a bug in closing"));
    assert_eq!(waiting.text, mixing_text(&ask("waiting").prompt, 5));
    wait_until_idle(&engine);
}

#[test]
fn shutting_down_finishes_what_was_taken_and_refuses_the_rest() {
    let (open, hook) = gate();
    let engine = start(
        FakeBackend::new(100, mixing).with_hook(hook),
        EngineOptions { max_running: 1, ..EngineOptions::default() },
    );
    let both = ["a", "b"].map(|text| engine.submit(Request { max_tokens: Some(5), ..ask(text) }).unwrap());
    open.send(()).unwrap();
    engine.shutdown(PATIENCE);
    for outcome in both.map(outcome) {
        assert_eq!(outcome.tokens.len(), 5);
    }
    assert_eq!(
        engine.submit(ask("late")).unwrap_err().to_string(),
        "the engine has stopped: it was shut down"
    );
}

#[test]
fn shutting_down_without_patience_fails_what_is_left() {
    let engine = start(FakeBackend::new(usize::MAX, mixing), EngineOptions::default());
    let mut endless = engine.submit(ask("endless")).unwrap();
    assert!(endless.blocking_recv().is_some());
    engine.shutdown(Duration::ZERO);
    let last = outcome(endless).failure;
    assert_eq!(last.as_deref(), Some("the engine has stopped: it was shut down"));
}

#[test]
fn dropping_the_last_handle_finishes_what_was_taken() {
    let backend = FakeBackend::new(100, mixing);
    let calls = backend.calls();
    let engine = start(backend, EngineOptions::default());
    let generation = engine.clone().submit(Request { max_tokens: Some(5), ..ask("Hi") }).unwrap();
    drop(engine);
    assert_eq!(outcome(generation).tokens.len(), 5);
    let begin = Instant::now();
    // The backend goes with the thread, and with it the last other owner of the calls.
    while Arc::strong_count(&calls) > 1 {
        assert!(begin.elapsed() < PATIENCE, "the thread did not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_all_closed(&calls);
}

#[test]
fn nothing_is_left_when_readers_come_and_go() {
    for pipeline in [false, true] {
        let backend = FakeBackend::new(300, mixing);
        let calls = backend.calls();
        let options = EngineOptions { max_running: 3, max_waiting: 1_000, ..with_pipeline(pipeline) };
        let engine = start(backend, options);
        let mut kept = Vec::new();
        for i in 0..300 {
            let request = Request {
                max_tokens: Some(1 + i * 7 % 40),
                prefill_chunk: Some(1 + i % 5),
                ignore_eos: true,
                sampling: SamplingParams {
                    temperature: if i % 4 == 0 { 1.0 } else { 0.0 },
                    ..SamplingParams::default()
                },
                ..ask(&"prompt".repeat(1 + i % 3))
            };
            let mut generation = engine.submit(request).unwrap();
            match i % 3 {
                0 => kept.push((i, generation)),
                1 => drop(generation),
                _ => {
                    // Read a little first, so that some go while they run.
                    (0..i % 4).for_each(|_| drop(generation.blocking_recv()));
                }
            }
        }
        for (i, generation) in kept {
            let outcome = outcome(generation);
            assert_eq!(outcome.tokens.len(), 1 + i * 7 % 40, "{:?}", outcome.failure);
        }
        wait_until_idle(&engine);
        assert_all_closed(&calls);
    }
}
