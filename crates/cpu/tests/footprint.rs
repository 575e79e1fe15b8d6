//! What the backend says it will take is what it takes: the allocator counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use lily_cpu::backend::prefill_chunk;
use lily_cpu::footprint::Footprint;
use lily_cpu::kv_cache::KvFormat;
use lily_cpu::{CpuBackend, CpuOptions, Numerics};
use lily_engine::backend::{Backend, DecodeStep, Input, Want};
use lily_model::checkpoint::Checkpoint;
use lily_model::geometry::Geometry;

/// The system's allocator, with a count of the bytes in use and of the most there were.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(used, Ordering::Relaxed);
        // SAFETY: by contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: by contract.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, so that nothing else allocates meanwhile.
#[test]
fn the_footprint_covers_what_is_allocated_and_not_much_more() {
    const THREADS: usize = 2;
    let tokens = 4 * prefill_chunk();
    let geometry = Checkpoint::demo().unwrap().geometry().clone();
    for numerics in [Numerics::Int8, Numerics::Int8KvQ8] {
        let weights = Checkpoint::demo().unwrap().weights().unwrap();
        let before = USED.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        let options =
            CpuOptions { threads: Some(THREADS), ctx_len: tokens, numerics, ..CpuOptions::default() };
        let mut backend = CpuBackend::new(weights, options).unwrap();
        let sequence = backend.open(None).unwrap();
        let prompt: Vec<u32> = (0..tokens as u32 - 1).map(|i| i % geometry.vocab as u32).collect();
        for chunk in prompt.chunks(prefill_chunk()) {
            let ticket = backend.extend(sequence, chunk, Want::Token).unwrap();
            backend.collect(ticket).unwrap();
        }
        let step = DecodeStep { sequence, input: Input::LastSampled, want: Want::Token };
        let ticket = backend.decode(&[step]).unwrap();
        backend.collect(ticket).unwrap();

        let taken = MOST.load(Ordering::Relaxed) - before;
        let said = Footprint::new(&geometry, numerics.kv_format(), THREADS, tokens);
        assert_eq!(said.state, backend.state_bytes());
        assert!(taken <= said.total(), "{taken} bytes were taken, {said:?}");
        assert!(said.total() - taken <= said.total() / 5, "only {taken} bytes were taken, {said:?}");
    }

    // The promise of the full model: at 32,768 tokens it takes little beside its 19.5 GB of weights.
    let full = |format, tokens| Footprint::new(&Geometry::qwen3_6_35b_a3b(), format, THREADS, tokens);
    assert!(full(KvFormat::F16, 32_768).total() < 1_000_000_000);
    // Its keys and values take 20 KB a token, and in 8 bits half of that and 40 scales.
    let per_token = |format| (full(format, 2048).state - full(format, 1024).state) / 1024;
    assert_eq!([KvFormat::F16, KvFormat::Q8].map(per_token), [20_480, 10_240 + 40 * 4]);
}
