//! Streams at once against one, and what a long prompt does to a stream.
//!
//! ```sh
//! cargo run --release -p lily-engine --example streams                       # the demo
//! cargo run --release -p lily-engine --example streams -- DIR 48 2048        # a checkpoint, tokens, long prompt
//! ```
//!
//! First the tokens per second of 1, 2, 4 and 8 streams together, from the moment that all of them have their
//! first token until the first one ends; the best of five rounds. Then the time between two tokens of one stream, alone and while a long
//! prompt is read beside it.

use std::path::Path;
use std::time::{Duration, Instant};

use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::engine::{Engine, EngineOptions, Event, Generation, Request};
use lily_model::checkpoint::Checkpoint;

/// Tokens of a stream's own prompt.
const PROMPT: usize = 32;
/// Tokens of the prompt that is read beside a stream.
const LONG_PROMPT: usize = 8192;
/// Rounds, of which the best counts: another program on the machine makes a round slower and none faster.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let checkpoint = match args.next() {
        Some(dir) => Checkpoint::open(Path::new(&dir))?,
        None => Checkpoint::demo()?,
    };
    let tokens: usize = args.next().map_or(Ok(256), |tokens| tokens.parse())?;
    let long_prompt: usize = args.next().map_or(Ok(LONG_PROMPT), |tokens| tokens.parse())?;
    let backend = CpuBackend::new(checkpoint.weights()?, CpuOptions::default())?;
    let options = EngineOptions::default();
    let engine = Engine::start(Box::new(backend), checkpoint.tokenizer()?, options);
    println!("{} on {}", checkpoint.name(), engine.description());

    let vocab = engine.vocab();
    let submit = |prompt: usize, seed: usize, tokens: usize| {
        let prompt = (0..prompt).map(|i| ((i * 7919 + seed * 104_729) % vocab.min(4000)) as u32).collect();
        engine.submit(Request { max_tokens: Some(tokens), ignore_eos: true, ..Request::new(prompt) })
    };
    // Pages of the weights that nobody has read yet would count for the first.
    arrivals(submit(PROMPT, 0, 16)?);

    let counts = [1, 2, 4, 8];
    let mut best = [0f64; 4];
    for _ in 0..ROUNDS {
        for (streams, best) in counts.into_iter().zip(&mut best) {
            let running =
                (0..streams).map(|seed| submit(PROMPT, seed, tokens)).collect::<Result<Vec<_>, _>>()?;
            *best = best.max(rate(running).ok_or("a stream gave nothing")?);
        }
    }
    for (streams, rate) in counts.into_iter().zip(best) {
        println!("{streams} streams: {rate:8.1} tokens/s together, {:.2} times one", rate / best[0]);
    }

    println!("one stream alone: {}", gaps(&arrivals(submit(PROMPT, 1, tokens)?)));
    let reader = submit(PROMPT, 1, usize::MAX)?;
    let long = submit(long_prompt, 2, 1)?;
    let stream = std::thread::spawn(move || arrivals(reader));
    let began = Instant::now();
    let first = arrivals(long).first().copied().ok_or("the long prompt gave nothing")?;
    // The stream has no end of its own.
    engine.shutdown(Duration::ZERO);
    let times: Vec<Instant> = stream.join().unwrap_or_default();
    let beside: Vec<Instant> = times.into_iter().filter(|time| (began..first).contains(time)).collect();
    println!(
        "while {long_prompt} tokens are read ({:.1} s): {}",
        (first - began).as_secs_f64(),
        gaps(&beside)
    );
    Ok(())
}

/// Tokens per second of some streams together, while all of them run.
fn rate(running: Vec<Generation>) -> Option<f64> {
    let readers: Vec<_> = running.into_iter().map(|g| std::thread::spawn(move || arrivals(g))).collect();
    let arrivals: Vec<Vec<Instant>> =
        readers.into_iter().map(|reader| reader.join().unwrap_or_default()).collect();
    let begin = *arrivals.iter().map(|times| times.first()).collect::<Option<Vec<_>>>()?.into_iter().max()?;
    let end = *arrivals.iter().map(|times| times.last()).collect::<Option<Vec<_>>>()?.into_iter().min()?;
    let counted = arrivals.iter().flatten().filter(|&&time| time > begin && time <= end).count();
    Some(counted as f64 / (end - begin).as_secs_f64())
}

/// When each token came.
fn arrivals(mut generation: Generation) -> Vec<Instant> {
    let mut times = Vec::new();
    while let Some(event) = generation.blocking_recv() {
        if matches!(event, Event::Token { .. }) {
            times.push(Instant::now());
        }
    }
    times
}

/// The times between tokens: median, 99th percentile, longest.
fn gaps(times: &[Instant]) -> String {
    let mut gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
    gaps.sort_by(f64::total_cmp);
    let at = |share: f64| gaps.get(((gaps.len() as f64 * share) as usize).min(gaps.len().saturating_sub(1)));
    match (at(0.5), at(0.99), gaps.last()) {
        (Some(median), Some(p99), Some(worst)) => {
            format!("{median:.1} ms between tokens at the median, {p99:.1} ms at p99, {worst:.1} ms at worst")
        }
        _ => "too few tokens".to_owned(),
    }
}
