//! Memory over a long time: many small requests under a small budget, and what stays resident.
//!
//! ```sh
//! cargo run --release -p lily-engine --example soak -- 20000
//! ```
//!
//! Conversations on the demo grow, branch and are given up; every seventh client hangs up. The cache has room for
//! a small part of it, so that snapshots come and go all the time, in memory and in a directory. A line for every
//! twentieth part: requests, bytes of state, snapshots, what went, resident memory.

use std::time::{Duration, Instant};

use lily_cpu::{CpuBackend, CpuOptions};
use lily_engine::engine::{CacheOptions, Engine, EngineOptions, Event, Generation, Load, Request};
use lily_engine::prefix_cache::disk::DiskOptions;
use lily_engine::prefix_cache::fingerprint::fingerprint;
use lily_model::checkpoint::Checkpoint;

const CACHE_BYTES: u64 = 64 << 20;
const DISK_BYTES: u64 = 64 << 20;
const STATE_BYTES: usize = 128 << 20;
/// Conversations that are kept up at once.
const CONVERSATIONS: usize = 40;
/// Requests under way at once.
const CLIENTS: usize = 6;
/// A conversation that is longer begins anew.
const LONGEST: usize = 400;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let requests: usize = std::env::args().nth(1).map_or(Ok(20_000), |count| count.parse())?;
    let checkpoint = Checkpoint::demo()?;
    let weights = checkpoint.weights()?;
    let directory = tempfile::tempdir()?;
    let disk =
        DiskOptions { dir: directory.path().to_owned(), bytes: DISK_BYTES, model: fingerprint(&weights) };
    let backend = CpuBackend::new(weights, CpuOptions { state_bytes: STATE_BYTES, ..CpuOptions::default() })?;
    let cache = CacheOptions { bytes: CACHE_BYTES, disk: Some(disk), ..CacheOptions::default() };
    let engine = Engine::start(
        Box::new(backend),
        checkpoint.tokenizer()?,
        EngineOptions { cache, ..EngineOptions::default() },
    );

    let mut random = Random(1);
    let mut conversations: Vec<Vec<u32>> = vec![Vec::new(); CONVERSATIONS];
    let mut running: Vec<(usize, Vec<u32>, Generation)> = Vec::new();
    let began = Instant::now();
    println!("requests  seconds   state MB  snapshots   evicted  from disk  resident MB");
    for request in 1..=requests {
        let index = random.below(CONVERSATIONS);
        let mut prompt = conversations[index].clone();
        if prompt.len() > LONGEST {
            prompt.clear();
        }
        if random.below(8) == 0 {
            prompt.truncate(random.below(prompt.len() + 1));
        }
        prompt.extend((0..4 + random.below(24)).map(|_| 300 + random.below(3000) as u32));
        let wishes = Request { max_tokens: Some(1 + random.below(6)), ..Request::new(prompt.clone()) };
        running.push((index, prompt, engine.submit(wishes)?));
        if running.len() == CLIENTS {
            let (index, prompt, generation) = running.swap_remove(random.below(CLIENTS));
            if random.below(7) > 0 {
                conversations[index] = finish(prompt, generation)?;
            }
        }
        if request % (requests / 20).max(1) == 0 {
            let stats = engine.stats();
            println!(
                "{request:8} {:8.1} {:10.1} {:10} {:9} {:10} {:12.1}",
                began.elapsed().as_secs_f64(),
                stats.memory.used as f64 / 1e6,
                stats.cache.snapshots,
                stats.cache.evicted,
                stats.loaded,
                resident_kib().unwrap_or(0) as f64 * 1024.0 / 1e6,
            );
        }
    }
    running.clear();
    while engine.load() != Load::default() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let memory = engine.stats().memory;
    println!(
        "at the end {} bytes of state, all but {} the cache's",
        memory.used,
        memory.used - memory.snapshots
    );
    engine.shutdown(Duration::from_secs(60));
    Ok(())
}

/// Reads an answer to its end and returns the conversation with it.
fn finish(mut conversation: Vec<u32>, mut generation: Generation) -> Result<Vec<u32>, String> {
    while let Some(event) = generation.blocking_recv() {
        match event {
            Event::Token { id, .. } => conversation.push(id),
            Event::Failed(reason) => return Err(reason),
            Event::Prefill { .. } | Event::Finished { .. } => {}
        }
    }
    Ok(conversation)
}

/// Memory of this process that is in physical memory, in KiB; Linux alone tells.
fn resident_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}
